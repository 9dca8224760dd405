"""Joins the other ranks, and leaves them.

`destroy_process_group` waits for pending collectives: on a rank that fails, until the timeout of the slowest. Aborting
ends them, but may itself hang in a driver. So a failure is reported first, then the groups are aborted, for a limited
time.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed has them untyped

from lockstep.core.errors import (
    CollectiveTimeout,
    ConfigError,
    Failure,
    Paused,
    PeerFailed,
    Problem,
    RunFailed,
    Stopped,
    blames_a_peer,
    causes,
    message_of,
    report_failure,
    timeout_message,
)
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.phase_clock import PhaseClock
from lockstep.core.process_settings import keep_freed_memory, set_environment
from lockstep.core.ranks import RankEnvironment
from lockstep.distributed import user_collectives
from lockstep.distributed.accelerators import choose_backend, choose_device
from lockstep.distributed.collectives import LocalGroup, RankGroup, waiting_over
from lockstep.distributed.host_group import forget_host_groups
from lockstep.distributed.network import INTERFACE_VARIABLES, other_interfaces, use_interface
from lockstep.distributed.notice_board import NoticeBoard
from lockstep.distributed.rounds import next_round
from lockstep.distributed.store_exchange import StoreExchange

if TYPE_CHECKING:
    from lockstep.config.schema import Launch
    from lockstep.core.protocols import Axis


@dataclass(slots=True)
class ReducedGradients:
    """Bytes of gradients that DDP's C++ reducer has reduced, as nccl-tests counts them."""

    size: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """The rank and its place among all ranks.

    Attributes:
        axis: All ranks.
        local_rank, machine_ranks: The rank on this machine, and the number of its ranks.
        backend: The backend of the collectives; `none` for a single process.
        exchange: Connects the ranks when collectives have failed; None for a single process.
        launcher_store: The store of a launcher that restarts its ranks; None: there is none.
        notices: The board for posts outside of collectives.
    """

    axis: Axis
    rank: int
    size: int
    local_rank: int
    machine_ranks: int
    device: torch.device
    backend: str
    exchange: StoreExchange | None = None
    launcher_store: Store | None = None
    clock: PhaseClock = field(default_factory=PhaseClock)
    notices: NoticeBoard = field(default_factory=lambda: NoticeBoard(None, 0, 1))
    reduced: ReducedGradients = field(default_factory=ReducedGradients)


@contextmanager
def joined(launch: Launch, *, grouped: bool) -> Iterator[World]:
    """Join the other ranks while the block runs.

    Args:
        grouped: Make a process group even for one rank (DDP on one rank needs it).

    Raises:
        ConfigError: The backend or device is missing here, or ranks share a device.
        RunFailed: The other ranks can't be reached within `launch.timeout`.
        CollectiveTimeout: A collective in the block timed out.
    """
    environment = RankEnvironment.read(os.environ)
    device = choose_device(launch.device, environment.local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    if environment.world_size == 1 and not grouped:
        with user_collectives.current_group(LocalGroup()):
            yield World(LocalGroup(), 0, 1, 0, 1, device, "none", clock=_clock(device))
        return
    if _is_aborting():  # torch has one process group, which can't be used any more
        raise RunFailed("the process group of a run that failed in this process could not be closed; start a new one")
    if dist.is_initialized():  # the user's program made the group, and ends it
        world = _world(environment, device, dist.get_backend(), launch.timeout, wakes=False)
        with waiting_over(world.exchange), user_collectives.current_group(world.axis), _failure_posted(world):
            yield world
        return
    backend = choose_backend(launch.backend, device)
    with set_environment({}, *INTERFACE_VARIABLES):
        _make_group(environment, backend, device, launch.timeout)
        world = _world(environment, device, backend, launch.timeout, wakes=backend == "gloo")
        with (
            _left_at_the_end(world),
            collective_timeout(launch.timeout, world.rank),
            waiting_over(world.exchange),
            user_collectives.current_group(world.axis),
        ):
            if isinstance(world.axis, RankGroup):
                world.axis.host()
            if world.exchange is not None:
                world.exchange.listen()
            yield world


@contextmanager
def _left_at_the_end(world: World) -> Iterator[None]:
    try:
        try:
            yield
        finally:
            forget_host_groups()
    except BaseException as error:
        if not isinstance(error, Paused):  # which all ranks raise after the same collective
            _abort_groups(error, world)
        raise
    finally:
        if isinstance(world.axis, RankGroup):
            world.axis.close()
        if dist.is_initialized() and not _is_aborting():
            dist.destroy_process_group()


_ABORT_LIMIT = 10.0  # seconds that an abort may take
_aborting: threading.Event | None = None
"""Set when the last abort has ended; until then no other code may use the process group. Process-wide, as the group."""
_log = logging.getLogger("lockstep")


def _is_aborting() -> bool:
    return _aborting is not None and not _aborting.is_set()


def _abort_groups(error: BaseException, world: World) -> None:
    """Report the error and abort all process groups; return after 10 s even if they can't be closed."""
    if dist.get_backend() != "gloo" and not report_failure(error) and world.size > 1:
        reason = message_of(error).strip() or "no message"
        _log.error("rank %d fails, and aborts its collectives: %s: %s", world.rank, type(error).__name__, reason)
    global _aborting
    ended = _aborting = threading.Event()
    by_others = isinstance(error, CollectiveTimeout | Stopped) or blames_a_peer(error)
    reached = None if by_others else world.exchange  # they know, and rank 0, which keeps the store, may have ended

    def abort() -> None:
        try:
            with suppress(Exception):  # nothing depends on it: the process, or its connection, ends
                _abort(world.device, reached)
        finally:
            ended.set()

    threading.Thread(target=abort, name="abort process groups", daemon=True).start()
    if not ended.wait(_ABORT_LIMIT):
        _log.error("rank %d: the process group could not be closed within %g s", world.rank, _ABORT_LIMIT)


def _abort(device: torch.device, exchange: StoreExchange | None) -> None:
    """Abort all groups. gloo has no abort: destroying the group closes its connections, so that waiting peers fail."""
    if dist.get_backend() == "gloo":
        if exchange is not None:
            exchange.fail()
        dist.destroy_process_group()
        return
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)  # a thread begins with the first one
    try:
        # torch's public API aborts a single group; this one aborts all, in the order that NCCL needs
        dist.distributed_c10d._abort_process_group()
    except RuntimeError:  # the backend has none
        dist.destroy_process_group()
    if exchange is not None:
        exchange.fail()


# The messages of gloo and of torch's store. NCCL's watchdog ends the process instead of raising.
_TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms for (recv|send) operation|Application timeout caused pair closure"
    r"|wait timeout after \d+ms"
)


@contextmanager
def collective_timeout(seconds: float, rank: int) -> Iterator[None]:
    """Limit all collectives in the block, also of groups that DeviceMesh, FSDP and DeepSpeed make.

    Raises:
        CollectiveTimeout: Not all ranks joined a collective in time.
    """
    c10d: Any = dist.distributed_c10d  # torch's default is private: no call sets it for groups made by others
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        if not is_timeout(error):
            raise
        raise CollectiveTimeout(timeout_message("another rank", f"rank {rank}", seconds)) from error
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def is_timeout(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is a collective's timeout."""
    return any(isinstance(link, RuntimeError) and _TIMED_OUT.search(str(link)) for link in causes(error))


@contextmanager
def _failure_posted(world: World) -> Iterator[None]:
    """Post a failure for ranks that wait without a limit. The group is the user's, so it isn't aborted."""
    try:
        yield
    except BaseException:
        if world.exchange is not None:
            world.exchange.fail()
        raise
    finally:
        forget_host_groups()


def _world(environment: RankEnvironment, device: torch.device, backend: str, timeout: float, *, wakes: bool) -> World:
    """Return this rank of the initialized process group; `wakes`: see `StoreExchange`."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    axis: Axis = RankGroup(group) if size > 1 else LocalGroup()
    store = dist.distributed_c10d._get_default_store()
    exchange = StoreExchange(store, rank, size, wakes=wakes, timeout=timeout) if size > 1 else None
    kept, notices = _launcher_store(environment, timedelta(seconds=timeout)), NoticeBoard(store, rank, size)
    here = environment.local_rank, environment.local_world_size
    return World(axis, rank, size, *here, device, backend, exchange, kept, _clock(device), notices)


def _clock(device: torch.device) -> PhaseClock:
    if device.type == "cpu":
        return PhaseClock()
    module = torch.get_device_module(device)
    streams: list[Any] = []

    def mark() -> Any:
        if not streams:  # at the end of an update: later marks may be made where another stream is current
            streams.append(module.current_stream(device))
        event = module.Event(enable_timing=True)
        event.record(streams[0])
        return event

    return PhaseClock(mark)


def _make_group(environment: RankEnvironment, backend: str, device: torch.device, timeout: float) -> None:
    limit, began = timedelta(seconds=timeout), time.monotonic()
    store: Store | None = None
    try:
        store = _store(environment, limit)
        use_interface(environment, store)
        refuse_shared_devices(store, environment.rank, environment.world_size, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on device_id, which is given where it applies
            rank, size = environment.rank, environment.world_size
            bound = device if backend == "nccl" else None
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=bound)
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{environment.master_addr}:{environment.master_port}"
        who = f"rank {environment.rank} could not join the other {environment.world_size - 1} ranks"
        reason, seconds = str(error).splitlines()[0], time.monotonic() - began
        no_way = "unreachable" in reason or "No route to host" in reason  # to an address, whoever listens there
        if blames_a_peer(error) and seconds < timeout and not no_way:  # it has ended, and reports why
            raise PeerFailed(f"{who} at {place}: one of them has ended ({reason})") from error
        reasons = [reason, *(other_interfaces(environment, store) if store is not None else ())]
        text = f"{who} at {place} in {seconds:.3g} of {timeout:g} s: {'; '.join(reasons)}"
        raise RunFailed(text, kind=FailureKind.NOT_JOINED) from error


def refuse_shared_devices(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Raise ConfigError if two ranks have the same accelerator, or some have none. All ranks together.

    Only the device's identity shows it: a rank that sees one GPU may share it, or have its own (--gpus-per-task).
    """
    if size == 1:
        return
    store.set(f"device/{rank}", device_identity(device))
    if rank == 0:
        identities = store.multi_get([f"device/{other}" for other in range(size)])  # waits for all of them
        store.set("devices", device_refusal([value.decode() for value in identities]))
    if refusal := store.get("devices").decode():
        raise ConfigError(Problem("", "launch.ranks", refusal))


def device_refusal(identities: list[str]) -> str:
    """Return why ranks on devices of these identities can't compute together; empty: they can."""
    types = [identity.partition(" ")[0] for identity in identities]
    if other := next((rank for rank, name in enumerate(types) if name != types[0]), None):
        return (
            f"rank 0 computes on {types[0]} and rank {other} on {types[other]}; let every rank see an accelerator "
            "(CUDA_VISIBLE_DEVICES, drivers of all nodes), or write launch.device: cpu"
        )
    owners: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if (owner := owners.setdefault(identity, rank)) != rank and types[0] != "cpu":
            return (
                f"ranks {owner} and {rank} have the same device, and {len(identities)} ranks have "
                f"{len(set(identities))} of {types[0]}; start one rank for each, or let each see its own "
                "(CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task)"
            )
    return ""


def device_identity(device: torch.device) -> str:
    """Return the device's type and a name that no other accelerator has, on any machine."""
    if device.type == "cpu":
        return device.type
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    name = getattr(properties, "uuid", None) or f"{socket.gethostname()}/{device.index}"
    return f"{device.type} {name}"


_stores: dict[tuple[str, int], Store] = {}  # process-wide: a port can't be bound again for the next session


def _store(environment: RankEnvironment, limit: timedelta) -> Store:
    """Return the store where ranks meet. A single rank needs none that listens.

    Lockstep's launcher passes on a socket that listens on loopback. Under other launchers, ranks of one machine bind to
    the one address that all were given: torch's store would listen on every interface.
    """
    if environment.world_size == 1:
        return HashStore()
    # several launches may share a store, as two of torchrun that name one endpoint: their ids differ
    meeting = PrefixStore(f"lockstep/{environment.launch_id}", _connected(environment, limit))
    name = next_round(meeting, environment.rank, environment.world_size, limit.total_seconds())
    return PrefixStore(name, meeting)


def _launcher_store(environment: RankEnvironment, limit: timedelta) -> Store | None:
    """Return the part of a launcher's store that survives restarts of the ranks."""
    if not environment.agent_store:
        return None
    return PrefixStore(f"lockstep/{environment.launch_id}/kept", _connected(environment, limit))


def _connected(environment: RankEnvironment, limit: timedelta) -> Store:
    address, ranks = (environment.master_addr, environment.master_port), environment.world_size
    if address not in _stores:
        options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": _listening(environment)}
        _stores[address] = TCPStore(*address, ranks, environment.keeps_store, timeout=limit, **options)
    return _stores[address]


def _listening(environment: RankEnvironment) -> int | None:
    """Return a socket that listens for this rank's store; None if other machines need to reach it."""
    if environment.store_fd is not None or not environment.keeps_store or not environment.one_machine:
        return environment.store_fd
    addresses = socket.getaddrinfo(environment.master_addr, environment.master_port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, backlog=max(128, 2 * environment.world_size)).detach()
