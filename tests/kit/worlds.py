"""Worlds of real processes over gloo, forked from a server that has imported torch once.

in_world(3, function, argument) --> [function(argument) on rank 0, on rank 1, on rank 2]
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing as mp
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, cast

from lockstep.launch import outside_watch

_CONTEXT = mp.get_context("forkserver")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else a library that asks for GPUs forbids forks
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
NAMES_A_RANK = outside_watch.names_a_rank
"""Ranks here put `False` in its place: their test watches them, and no process of Lockstep's does."""
_CONTEXT.set_forkserver_preload(["kit.warm"])
_TESTS = str(Path(__file__).parents[1])
_PATIENCE_S = 120.0
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
_DEATH_S = 10.0  # from the end of a rank's pipe until its exit status is known
_FIRST_PORT, _PORTS = 12_000, 18_000
_numbers = itertools.count(os.getpid() * 211)  # test runs side by side begin far apart


def in_world(ranks: int, function: Callable[..., Any], *arguments: Any, patience: float = _PATIENCE_S) -> list[Any]:
    """What `function(*arguments)` returned on each rank; a rank that raises fails the test with its traceback, and
    one that a signal ends with the signal and the stacks of its threads.

    Args:
        patience: seconds until ranks that are still running count as hanging.
    """
    context = served()
    port = free_port()
    started = []
    for rank in range(ranks):
        result, theirs = context.Pipe(duplex=False)
        stacks, of_faults = context.Pipe(duplex=False)
        place = (rank, ranks, port)
        process = context.Process(target=_rank, args=(*place, theirs, of_faults, function, arguments), daemon=True)
        process.start()
        theirs.close()
        of_faults.close()
        started.append(_Started(process, result, stacks))
    try:
        return _results(started, patience)
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.join()


@dataclass
class _Started:
    """A rank: its process, what it returns or raises, and where it writes its stacks if a signal ends it."""

    process: ForkServerProcess
    result: Connection
    stacks: Connection


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returned in a new process, which is no rank: it may start ranks, and quickly."""
    return in_world(1, _as_no_rank, function, arguments)[0]


def _as_no_rank(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    for name in _PLACE:
        del os.environ[name]
    return function(*arguments)


def served() -> ForkServerContext:
    """Where processes start. The server, started if need be, looks for modules in PYTHONPATH, and nowhere else
    of what tests have."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_TESTS, *([before] if before else [])])
    try:
        cast("Any", forkserver)._forkserver.ensure_running()  # the module's own name starts one even if one is shared
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return _CONTEXT


def fork_server() -> str:
    """The address of the server that ranks are forked from, for `share_fork_server` in another process."""
    served()
    return str(cast("Any", forkserver._forkserver)._forkserver_address)


def share_fork_server(address: str) -> None:
    """Fork ranks from another process's server instead of one of this process."""
    server = cast("Any", forkserver._forkserver)
    server._forkserver_address = address
    server._forkserver_alive_fd = os.pipe()[1]  # ranks close what keeps their server alive
    server.ensure_running = resource_tracker.ensure_running


def _results(started: list[_Started], patience: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(started):
        ready = wait([rank.result for number, rank in enumerate(started) if number not in results], timeout=patience)
        if not ready:
            raise AssertionError(f"ranks {sorted(set(range(len(started))) - set(results))} hang")
        for number, rank in enumerate(started):
            if rank.result in ready:
                results[number] = _received(rank, number)
    return [results[number] for number in range(len(started))]


def _received(rank: _Started, number: int) -> Any:
    try:
        fine, value = rank.result.recv()
    except EOFError:
        raise AssertionError(f"rank {number} {_death(rank)}") from None
    if not fine:
        raise AssertionError(f"rank {number} raised\n{value}")
    return value


def _death(rank: _Started) -> str:
    """How a rank has ended that returned nothing."""
    rank.process.join(_DEATH_S)
    code = rank.process.exitcode
    if code is None or code >= 0:
        return f"returned nothing (exit code {code})"
    os.set_blocking(rank.stacks.fileno(), False)
    try:
        stacks = os.read(rank.stacks.fileno(), 1 << 16).decode(errors="replace")
    except BlockingIOError:  # its children still have the other end
        stacks = ""
    return f"was ended by {signal.Signals(-code).name}\n{stacks or 'without a stack'}"


def _rank(
    rank: int,
    ranks: int,
    port: int,
    result: Connection,
    of_faults: Connection,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch

    from kit import sharding_memory

    outside_watch.names_a_rank = lambda environ: False
    faulthandler.enable(file=of_faults.fileno())
    torch.set_num_threads(1)
    cast("Any", mp.current_process())._config["daemon"] = False  # data workers are its children
    mp.set_start_method("fork", force=True)  # as of ranks that a launcher starts
    place = (rank, ranks, rank, ranks, port, "127.0.0.1")
    os.environ.update(zip(_PLACE, map(str, place), strict=True))
    try:
        returned = function(*arguments)
        sharding_memory.keep_new_results()  # before the result, after which the rank is killed
        result.send((True, returned))
    except BaseException:
        result.send((False, traceback.format_exc()))
    if rank == 0 and ranks > 1:  # others may still ask its store; it is killed when all have returned
        cast("Any", mp.parent_process()).join()


def free_port() -> int:
    """A port below those that the system assigns to connections: no process gets it before the first rank binds it."""
    for _ in range(_PORTS):
        port = _FIRST_PORT + next(_numbers) % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
