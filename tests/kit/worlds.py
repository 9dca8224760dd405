"""Worlds of real processes over gloo, forked from a server that has imported torch once.

in_world(3, function, argument) --> [function(argument) on rank 0, on rank 1, on rank 2]
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, cast

_CONTEXT = mp.get_context("forkserver")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else a library that asks for GPUs forbids forks
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
_CONTEXT.set_forkserver_preload(["kit.warm"])
_TESTS = str(Path(__file__).parents[1])
_PATIENCE_S = 120.0
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
_FIRST_PORT, _PORTS = 12_000, 18_000
_numbers = itertools.count(os.getpid() * 211)  # test runs side by side begin far apart


def in_world(ranks: int, function: Callable[..., Any], *arguments: Any, patience: float = _PATIENCE_S) -> list[Any]:
    """What `function(*arguments)` returned on each rank; a rank that raises fails the test with its traceback.

    Args:
        patience: seconds until ranks that are still running count as hanging.
    """
    context = served()
    port = free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, ranks, port, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _results(pipes, patience)
    finally:
        for process in processes:
            process.kill()
            process.join()


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
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return _CONTEXT


def _results(pipes: list[Connection], patience: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], timeout=patience)
        if not ready:
            raise AssertionError(f"ranks {sorted(set(range(len(pipes))) - set(found))} hang")
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                found[rank] = _received(pipe, rank)
    return [found[rank] for rank in range(len(pipes))]


def _received(pipe: Connection, rank: int) -> Any:
    try:
        fine, value = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died silently") from None
    if not fine:
        raise AssertionError(f"rank {rank} raised\n{value}")
    return value


def _rank(rank: int, ranks: int, port: int, pipe: Connection, function: Callable[..., Any], arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    cast("Any", mp.current_process())._config["daemon"] = False  # data workers are its children
    mp.set_start_method("fork", force=True)  # as of ranks that a launcher starts
    place = (rank, ranks, rank, ranks, port, "127.0.0.1")
    os.environ.update(zip(_PLACE, map(str, place), strict=True))
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def free_port() -> int:
    """A port below those that the system assigns to connections: no process gets it before the first rank binds it."""
    for _ in range(_PORTS):
        port = _FIRST_PORT + next(_numbers) % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
