"""Runs a rank, from the first instruction of its process to its exit code.

A rank and its data workers ignore SIGINT: on Ctrl-C the launcher sends SIGTERM to each rank once. Until a run
handles signals itself, a rank dies of SIGTERM and SIGUSR1 at once. An exception is raised only if the launcher ends
the rank because others have failed, so that a rank that is failing, too, can still report why.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import NoReturn

from lockstep.core import heartbeat
from lockstep.core.errors import Paused, Stopped, reports_failures
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import Heartbeat
from lockstep.core.process_settings import raise_open_file_limit
from lockstep.core.ranks import STORE_FD
from lockstep.core.safe_path import let_children_search
from lockstep.core.secrets import shareable
from lockstep.core.stopping import (
    SAVE_SIGNAL,
    STOP_SIGNALS,
    StartHandler,
    die_of,
    die_with_parent,
    no_effect,
    write_stderr,
)
from lockstep.launch import streams
from lockstep.launch.ends import End, end_of_exception, end_of_return
from lockstep.launch.other_launchers import set_threads
from lockstep.launch.rank_stacks import answer_requests


@dataclass(frozen=True, slots=True)
class RankTask:
    """The launcher's instructions for a rank, in addition to its environment.

    Attributes:
        launcher: The launcher's process id.
        log: The file for its output; None for the terminal only.
        listener: The socket where the store will listen, for rank 0.
        stdin: A descriptor of the launcher's standard input, which a single rank keeps, for a debugger.
    """

    rank: int
    launcher: int
    forked: bool
    log: Path | None
    listener: socket | None
    stdin: int | None = None
    heartbeat: Heartbeat | None = None


class _Signalled(Stopped):
    """SIGTERM has arrived; raised wherever the main thread is."""


def run_rank(entry: Callable[[], int], task: RankTask, channel: Connection) -> NoReturn:
    """Run `entry` in a rank's process, with its environment variables set already."""
    die_with_parent(task.launcher)
    let_children_search()
    if task.forked:
        atexit._clear()  # the launcher's own exit functions
    if task.stdin is not None:
        os.dup2(task.stdin, 0)  # multiprocessing has put the null device there
        sys.stdin = os.fdopen(0, closefd=False)
    _handle_launcher_signals(channel)
    if task.heartbeat is not None:
        answer_requests(task.heartbeat)
        heartbeat.use(task.heartbeat)
    if task.log is not None and task.rank > 0:
        streams.redirect(task.log)
    log = streams.doubled(task.log) if task.rank == 0 else contextlib.nullcontext()
    with log, set_threads(os.environ):  # torch may have been imported before this process was forked
        if task.listener is not None:
            os.environ[STORE_FD] = str(task.listener.detach())  # the store closes it

        def unblock_signals_and_run() -> int:  # the launcher has blocked them until `run_entry` can report them
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
            return entry()

        def send_early(error: BaseException) -> None:
            with contextlib.suppress(OSError):
                channel.send(replace(_end_of_error(error, time.monotonic()), detail=""))

        with reports_failures(send_early):  # the launcher takes the first report
            end = run_entry(unblock_signals_and_run)
        for number in (signal.SIGTERM, signal.SIGUSR1, SAVE_SIGNAL):
            signal.signal(number, no_effect)  # it is ending; nothing to interrupt
        if task.log is not None:
            append_end(task.log, end)
        with contextlib.suppress(OSError, EOFError):  # the launcher is gone, and the kernel ends this process
            channel.send(replace(end, detail=""))
            if task.rank == 0 and end.kind is FailureKind.DONE:
                channel.recv()  # its peers may still use the store: wait until it is the last
    leave(end.kind.exit_code)


def leave(code: int) -> NoReturn:
    """End this process with `code`, after its threads and exit functions, but without finalizing the interpreter.

    Finalizing one that has imported torch takes 0.3 s, and with a DDP model in it torch 2.13 aborts now and then
    (`terminate called without an active exception`): a finished rank would count as a failed one.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # ends pools of threads, then joins all: as at any exit
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # data workers and other children
    atexit._run_exitfuncs()
    streams.flush()
    os._exit(code)


def run_entry(entry: Callable[[], int]) -> End:
    """Run `entry` and return how it ended, whatever it raised."""
    raise_open_file_limit()
    try:
        return end_of_return(entry(), time.monotonic())
    except BaseException as error:
        # In a function: a local here would make a reference cycle of error and frames, and what the entry held (data
        # workers) would be closed only when garbage is collected, in any order.
        return _end_of_error(error, time.monotonic())


def _end_of_error(error: BaseException, now: float) -> End:
    earlier = error.__context__ if isinstance(error, _Signalled) else None  # it was failing when the signal arrived
    shown = earlier or error
    frames = shown.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return end_of_exception(shown, now, frames)


@contextlib.contextmanager
def signals_stop() -> Iterator[None]:
    """Raise `Paused` on SIGTERM and SIGUSR1 while the block runs, unless they are handled already: nothing is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int) -> None:
        raise Paused(f"stopped by {signal.Signals(number).name}")

    numbers = [n for n in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, StartHandler(stop))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _handle_launcher_signals(channel: Connection) -> None:
    def refuse_save(number: int) -> None:
        if os.environ.get("RANK") == "0":
            write_stderr("nothing to save yet")

    def stop(number: int) -> None:
        if channel.poll():  # the launcher has announced the signal: others have failed
            raise _Signalled("stopped by SIGTERM")
        streams.flush()
        die_of(number)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, StartHandler(stop))
    signal.signal(SAVE_SIGNAL, StartHandler(refuse_save))
    faulthandler.enable(file=2)  # prints the Python stack at a crash in C++


def append_end(log: Path, end: End) -> None:
    """Append why a rank failed to its log, with the traceback that its message leaves out."""
    if end.text:
        append(log, f"{end.detail}\n\n{end.text}" if end.detail else end.text)


def append(log: Path, text: str) -> None:
    """Append to a rank's log, not to its terminal; ignore a log that can't be written."""
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{shareable(text)}\n")
