"""Starts the ranks of this machine, and waits until the last has ended.

    command --> imports torch, once --> forks rank 0, 1, ... --> entry() in each --> the run's exit code
                about 0.95 s            milliseconds             0 done, 1 failed, 2 config, 130 stopped

A rank forked from a process that has imported torch (and what else all ranks need), and done nothing with it, need not
import it again. Where forking isn't safe (threads are running, CUDA is in use, no Linux), or `launch.environment` has
what a process reads as it starts (LD_PRELOAD), ranks start as fresh interpreters. One rank needs
no process: it runs in this one, with the same environment, log and exit codes.

Why not torch's own engine, `torch.distributed.elastic.multiprocessing.start_processes`? It is as fast when it forks,
and `elastic_launch` nearly so. But of two ranks in an all-reduce, one killed by SIGKILL, it named the other's broken
connection as the failure every time; a rank that ended by KeyboardInterrupt counted as done and left the run waiting
for ever; and a tee takes rank 0's terminal away. Exit codes and first causes are what people see of a launcher, so they
are kept here (`group`, `ends`). An elastic agent's place is above: it would start `rank.run_rank` on each node.

Ranks of one machine meet on loopback. The launcher itself binds the store's port and hands the listening socket to
rank 0 (see `core.ranks`): no other launch can take the port in between, and no other machine can reach the store.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.config.schema import Launch
from lockstep.core.closed_streams import open_closed_streams
from lockstep.core.control_groups import kernel_kills, why_killed
from lockstep.core.errors import ConfigError, Problem, Stopped
from lockstep.core.ranks import LAUNCHER, RankEnvironment, started_by_lockstep
from lockstep.core.safe_path import safe_interpreters
from lockstep.core.stopping import blocked_signals, handled_signals
from lockstep.launch import streams
from lockstep.launch.devices import check_ranks, threads_per_rank
from lockstep.launch.ends import End, EndKind, describe, first_cause
from lockstep.launch.group import Member, SignalRequests, watch
from lockstep.launch.other_launchers import read_at_start, refuse_unsettable, set_environment
from lockstep.launch.outcome import LaunchResult, print_on_stderr
from lockstep.launch.rank import RankTask, append_end, run_entry, run_rank, signals_stop

_LOOPBACK = "127.0.0.1"
_UNGUARDED = 97  # exit code of a fresh interpreter that would start ranks while it imports the script
_GUARD = (
    "the script starts ranks as it is imported, and its ranks, which are fresh interpreters, import it: put the call "
    'under `if __name__ == "__main__":`'
)
_LONGEST_REASON = 300
_OF_A_STOP = (EndKind.INTERRUPTED, EndKind.PEER, EndKind.ENDED)  # ranks that stop break what binds them


def launch(
    entry: Callable[[], int],
    ranks: int,
    launch: Launch,
    logs: Path | None,
    *,
    apart: bool = False,
    ahead: Sequence[str] = (),
    remedy: str = "",
) -> LaunchResult:
    """Run `entry` on `ranks` ranks of this machine; `.show()` prints why it failed and returns the run's exit code.

    Each rank finds itself in `RankEnvironment.read(os.environ)`. The first rank to fail is named with its
    traceback, or with its message if it raised a `Failure`, whose exit code is then the run's; the others are ended.

    Args:
        entry: returns the rank's exit code. Must be importable by name if ranks can't be forked.
        ranks: on this machine.
        launch: `port`, `environment`; `timeout`: seconds an orderly stop may take, for a collective may take as long.
        logs: folder for rank-N.log. Rank 0 also prints to the terminal, the others only to their files, and their
            warnings are shown at the end. None: all ranks print to the terminal.
        apart: one rank, too, gets a process of its own, so that this one stays fit to fork others.
        ahead: modules that every rank is going to import; importing them must start no threads and touch no GPU.
        remedy: what to change if a rank is killed because memory ran out: one or more sentences.

    Raises:
        ConfigError: if the ranks can't be started as asked; nothing has been started then.
    """
    refuse_unsettable(launch.environment)
    note = check_ranks(ranks, launch)
    if note:
        print_on_stderr(f"note: {note}")
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    fresh = bool(read_at_start(launch.environment))
    if ranks == 1 and not apart and not fresh:
        return _run_here(entry, launch, logs)
    with _without_garbage_collection():
        importlib.import_module("torch")
        for name in ahead:
            with contextlib.suppress(ImportError):  # a rank that needs it reports that
                importlib.import_module(name)
    return _run_ranks(entry, ranks, launch, logs, remedy, last=not apart, forks=not fresh and may_fork())


def may_fork() -> bool:
    """Return whether a forked copy of this process can compute: no other threads, no CUDA.

    OpenBLAS (numpy) keeps threads that it ends in a fork handler, and starts again when it needs them; libgomp's
    (torch, after its first parallel loop) do not survive, and a child that computes waits for them for ever. A child
    that does nothing makes the former end and shows the latter.
    """
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and bool(torch.cuda.is_initialized())
    if sys.platform != "linux" or threading.active_count() > 1 or uses_cuda:
        return False
    if _native_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return _native_threads() == 1


def _run_here(entry: Callable[[], int], launch: Launch, logs: Path | None) -> LaunchResult:
    variables = {**RankEnvironment(master_port=launch.port).variables(), LAUNCHER: str(os.getpid())}
    log = streams.log_path(logs, 0) if logs else None
    with set_environment({**variables, **launch.environment}), streams.doubled(log), signals_stop():
        ends = [run_entry(entry)]
        if log is not None:
            append_end(log, ends[0])
        return _conclude(ends, launch, None)


def _run_ranks(
    entry: Callable[[], int], ranks: int, launch: Launch, logs: Path | None, remedy: str, *, last: bool, forks: bool
) -> LaunchResult:
    logged = streams.sizes(logs, ranks) if logs else []
    members: list[Member] = []
    killed_before = kernel_kills()
    with contextlib.closing(SignalRequests()) as requests, handled_signals(requests.stop, requests.save, last=last):
        try:
            with blocked_signals(forks=forks), _listener(launch.port, ranks) as listener, _frozen_heap():
                _start(entry, ranks, launch, logs, listener, members, forks)
            ends = watch(members, requests, launch.timeout)
        finally:
            for member in members:
                if member.ended is None:
                    member.end(signal.SIGKILL)
                member.close()
        sigkill = why_killed(killed_before, kernel_kills(), remedy)
        if not forks and any(end.kind is EndKind.CODE and end.code == _UNGUARDED for end in ends):
            raise ConfigError(_GUARD)
        result = _conclude(ends, launch, requests, sigkill)
        if logs is not None and result.code == 0:
            for remark in streams.remarks(logs, logged):
                print_on_stderr(remark)
        return replace(result, logs=logs) if result.code == 1 and logs is not None and logs.is_dir() else result


def _conclude(ends: list[End], launch: Launch, requests: SignalRequests | None, sigkill: str = "") -> LaunchResult:
    """Return the result of the run."""
    cause = first_cause(ends)
    if cause is None:
        return LaunchResult(0)
    end = ends[cause]
    if requests is not None and requests.last_stop is not None and end.kind in _OF_A_STOP:
        at_once = "at once by a second signal, " if requests.stops > 1 else "by "
        return LaunchResult(Stopped.exit_code, f"stopped {at_once}{requests.last_stop.name}")
    text = describe(cause, ends, launch.timeout, sigkill)
    is_traceback = end.kind in (EndKind.TRACEBACK, EndKind.PEER) and "\n" in text
    return LaunchResult(end.code or 1, text, is_traceback, end.problems if text == end.text else ())


def refuse_import_of_script() -> None:
    """Raise ConfigError while the script is imported by a rank: ranks that can't be forked import the script, so it
    must not start them again.

    Raises:
        ConfigError: another process that the script has started, such as a data worker, imports it.
    """
    # multiprocessing's own sign that the main module is being imported, by which it refuses to start processes
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if started_by_lockstep(os.environ):
        os._exit(_UNGUARDED)  # the launcher says why, once
    raise ConfigError(_GUARD)


def _start(
    entry: Callable[[], int],
    ranks: int,
    launch: Launch,
    logs: Path | None,
    listener: socket.socket,
    members: list[Member],
    forks: bool,
) -> None:
    """Start the ranks and append them to `members`, so that the caller can end them if one can't be started."""
    context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each forked rank would print it again
    for rank in range(ranks):
        log = streams.log_path(logs, rank) if logs else None
        task = RankTask(rank, os.getpid(), forks, log, listener if rank == 0 else None)
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(entry, task, theirs), name=f"rank-{rank}")
        with (
            set_environment(_variables(rank, ranks, listener, launch.environment)),
            safe_interpreters(),
            _explained(),
        ):
            process.start()
        theirs.close()
        members.append(Member(process, ours))


def _variables(rank: int, ranks: int, listener: socket.socket, configured: Mapping[str, str]) -> dict[str, str]:
    port = listener.getsockname()[1]
    ours = RankEnvironment(rank, ranks, rank, ranks, _LOOPBACK, port).variables()
    ours[LAUNCHER] = str(os.getpid())
    share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return {**share, **configured, **ours}


@contextlib.contextmanager
def _listener(port: int, ranks: int) -> Iterator[socket.socket]:
    """Yield a socket that listens on loopback, on `port` or on any free one."""
    try:
        server = socket.create_server((_LOOPBACK, port), backlog=max(128, 2 * ranks))
    except OSError as error:
        message = f"can't listen on port {port} ({os.strerror(error.errno or 0)}); 0 takes any free port"
        raise ConfigError(Problem("", "launch.port", message)) from None
    with server:  # closed here once rank 0 holds it: if that rank dies, its peers' connections must break
        yield server


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise ConfigError where a fresh interpreter can't get the entry by its name."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"what the ranks need can't be sent to them: {str(error)[:_LONGEST_REASON]}. This process has threads or "
            "CUDA, or launch.environment is to be read at the start of a process, so its ranks are fresh interpreters. "
            "Define functions and classes at the top of a module (no lambda), or start the ranks before the first "
            "computation"
        ) from error


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, which makes them 10 % faster."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Freeze garbage collection: forked ranks then never touch, and so never copy, the pages of what exists now."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))
