"""Starts the processes of a round's ranks: forks of the launcher, which has imported what they need.

Ranks that are fresh interpreters inherit a file in memory with their entry. Multiprocessing's pickler would
put tensors into memory that all ranks share: a step of one changed the others' weights.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Watchdog
from lockstep.core.closed_streams import open_closed_streams
from lockstep.core.errors import ConfigError, Problem, RunFailed, message_of
from lockstep.core.heartbeat import shared_heartbeat
from lockstep.core.ranks import ADDRESS, LAUNCHER, NODES, RankEnvironment
from lockstep.core.safe_path import safe_interpreters
from lockstep.core.stopping import blocked_signals
from lockstep.launch import streams
from lockstep.launch.agent import Hosts
from lockstep.launch.devices import threads_per_rank
from lockstep.launch.group import RankProcess
from lockstep.launch.hang_watch import HangWatch, LearnedTimes
from lockstep.launch.other_launchers import interface_variables, set_environment
from lockstep.launch.rank import RankTask, run_rank

_MAX_REASON_LENGTH = 300  # characters
_REASONS = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)
_LOOPBACK = "127.0.0.1"


class SentEntry:
    """An entry that is pickled when a process is started with it: only then locks may be."""

    def __init__(self, entry: Callable[[], int]) -> None:
        self._entry = entry
        self._file: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        self._file = os.fdopen(os.memfd_create("entry"), "w+b")
        try:
            _write(self._entry, self._file)
        except _REASONS as error:
            raise _unsendable(error) from error
        self._file.flush()
        return _ReceivedEntry, (DupFd(self._file.fileno()),)


class _ReceivedEntry:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __call__(self) -> int:
        import torch

        try:
            with os.fdopen(self._file.detach(), "rb") as file:
                file.seek(0)
                entry = torch.load(file, map_location="cpu", weights_only=False)
        except AttributeError as error:  # a class of an interactive `__main__`, without cloudpickle
            raise _unsendable(error) from error
        return entry()  # type: ignore[no-any-return]


def _write(entry: Callable[[], int], file: Any) -> None:
    import torch

    try:
        from cloudpickle import Pickler as ByValue
    except ImportError:
        ByValue = None
    if ByValue is None or "__file__" in vars(sys.modules["__main__"]):  # a script, which the ranks import
        try:
            return torch.save(entry, file, pickle_module=_pickle_module(pickle.Pickler, copyreg.dispatch_table))
        except _REASONS:
            if ByValue is None:
                raise
            file.seek(0)
            file.truncate()
    return torch.save(entry, file, pickle_module=_pickle_module(ByValue, ByValue.dispatch_table))


def _pickle_module(pickler: type[pickle.Pickler], table: MutableMapping[Any, Any]) -> Any:
    """Return a module for `torch.save`, whose pickler sends what multiprocessing does, and tensors' values."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    others = {kind: how for kind, how in reducers.items() if not how.__module__.startswith("torch.")}

    class Pickler(pickler):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.dispatch_table = ChainMap(others, table)

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)


def _unsendable(error: Exception) -> ConfigError:
    return ConfigError(
        f"what the ranks need can't be sent to them: {str(error)[:_MAX_REASON_LENGTH]}. This process has threads or "
        "uses an accelerator, or launch.environment has a variable that is read when a process starts, so its ranks "
        "are fresh interpreters. Install cloudpickle, which sends lambdas and what a notebook's cells define, or "
        "define functions and classes at the top of a module. Locks, open files and connections can't be sent: open "
        "them in the ranks, such as in the dataset's first __getitem__"
    )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The arguments of a launch, as of `launch`."""

    entry: Callable[[], int]
    ranks: int
    section: Launch
    logs: Path | None
    forks: bool
    hosts: Hosts | None
    watchdog: Watchdog | None
    times: LearnedTimes = field(default_factory=LearnedTimes)

    @property
    def first(self) -> int:
        """The first of this machine's ranks among all."""
        return 0 if self.hosts is None else self.hosts.here.first

    @property
    def size(self) -> int:
        """Number of ranks on all hosts."""
        return self.ranks if self.hosts is None else self.hosts.size


@dataclass
class Round:
    """The processes of a round's ranks.

    Attributes:
        hangs: The watch over them.
    """

    job: Ranks
    hangs: HangWatch | None
    members: list[RankProcess] = field(default_factory=list)

    @classmethod
    def begin(cls, job: Ranks) -> Round:
        """Start the ranks of a round. Raises RunFailed where they can't be, for lack of descriptors for example."""
        hangs = None
        if job.watchdog is not None and job.watchdog.enabled:
            beats = [shared_heartbeat() for _ in range(job.ranks)]
            hangs = HangWatch(job.watchdog, beats, job.logs, job.first, alone=job.hosts is None, times=job.times)
        begun = cls(job, hangs)
        try:
            with blocked_signals(forks=job.forks), _store_listener(job) as listener:
                gc.freeze()  # forked ranks then never touch, and so never copy, the pages of existing objects
                try:
                    _start(job, listener, begun)
                finally:
                    gc.unfreeze()
        except BaseException as error:
            begun.close()
            if isinstance(error, OSError):
                raise RunFailed(f"its ranks can't be started: {message_of(error)}") from error
            raise
        return begun

    def close(self) -> None:
        """Kill the ranks that are left, and forget them."""
        if self.hangs is not None:
            self.hangs.close()
        left = [member for member in self.members if member.ended is None]
        for member in left:
            member.end(signal.SIGKILL)
        for member in self.members:
            member.close()


def _start(job: Ranks, listener: socket.socket | None, begun: Round) -> None:
    """Start the ranks and append them to the round, so that the caller can end them if one can't be started."""
    context = multiprocessing.get_context("fork") if job.forks else multiprocessing.get_context("spawn")
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each forked rank would print it again
    ranks, hosts = job.ranks, job.hosts
    network = interface_variables(job.section.interface, "" if hosts is None else hosts.address)
    port = 0 if listener is None else int(listener.getsockname()[1])
    if hosts is not None:
        network = {NODES: str(len(hosts.world)), ADDRESS: hosts.address, **network}
        port = port or hosts.store_port
    share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    entry = job.entry if job.forks else SentEntry(job.entry)
    stdin = os.dup(0) if job.forks and job.size == 1 else None
    for place in range(ranks):
        rank = job.first + place
        log = streams.log_path(job.logs, rank) if job.logs else None
        beats = None if begun.hangs is None else begun.hangs.heartbeats[place]
        task = RankTask(rank, os.getpid(), job.forks, log, listener if rank == 0 else None, stdin, beats)
        channel, rank_channel = context.Pipe()
        process = context.Process(target=run_rank, args=(entry, task, rank_channel), name=f"rank-{rank}")
        identity = RankEnvironment(rank, job.size, place, ranks, _LOOPBACK, port).variables()
        variables = {**share, **network, **job.section.environment, **identity, LAUNCHER: str(os.getpid())}
        with set_environment(variables), safe_interpreters():
            process.start()
        rank_channel.close()
        begun.members.append(RankProcess(process, channel, beats))
    if stdin is not None:
        os.close(stdin)


@contextlib.contextmanager
def _store_listener(job: Ranks) -> Iterator[socket.socket | None]:
    """Yield the socket on which the ranks' store will listen; None if rank 0 is on another host.

    It is closed here once rank 0 has it: if that rank dies, its peers' connections must break.
    """
    if job.first > 0:
        yield None
        return
    port = job.section.port
    try:
        listener = socket.create_server((_LOOPBACK, port), backlog=max(128, 2 * job.size))
    except OSError as error:
        message = f"can't listen on port {port} ({os.strerror(error.errno or 0)}); 0 takes any free port"
        raise ConfigError(Problem("", "launch.port", message)) from None
    with listener:
        yield listener
        if job.hosts is not None:  # once, and only for ranks that could be started
            job.hosts.open_store(listener.getsockname()[1])
