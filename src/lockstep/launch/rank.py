"""A rank from the inside: from the first instruction of its process to its exit code.

    tie --------> signals ------> streams ----> threads ----> entry() ----> End, to the launcher ----> exit code
    ends with     SIGTERM stops   log, or       its share     returned
    the launcher  SIGINT: deaf    terminal      of the cores  or raised

Ctrl-C reaches every process of a terminal. Only the launcher listens to it, and says "stop" to each rank once, as
SIGTERM; so a rank is deaf to SIGINT, as are its data workers. Code in a rank that handles SIGINT itself must leave it
alone if it finds it ignored, which is what nohup, too, asks of a program.

Until a run handles signals itself, a rank dies of SIGTERM and SIGUSR1 at once: there is nothing to save, and an
exception would be lost wherever it happened to arrive. Only where the launcher ends it because others have failed is
one raised, so that a rank that is failing, too, can still report why.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import NoReturn

from lockstep.core.errors import Stopped
from lockstep.core.ranks import STORE_FD
from lockstep.core.safe_path import let_children_search
from lockstep.core.secrets import masked, secrets_in
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
from lockstep.launch.ends import End, EndKind, end_of_exception, end_of_return

_OPEN_FILES = 65_536  # more than any run has; a limit of many millions makes other programs slow


@dataclass(frozen=True, slots=True)
class RankTask:
    """The launcher's instructions for a rank, besides its environment.

    Attributes:
        rank: of all.
        launcher: its process id.
        forked: from the launcher; otherwise the rank runs in an interpreter of its own.
        log: where it writes what it says, if anywhere.
        listener: rank 0: the socket on which the store will listen.
    """

    rank: int
    launcher: int
    forked: bool
    log: Path | None
    listener: socket | None


class _Signalled(Stopped):
    """Raised where the rank was when SIGTERM came."""


def run_rank(entry: Callable[[], int], task: RankTask, channel: Connection) -> NoReturn:
    """Run `entry` in a rank's process, whose environment is set already."""
    die_with_parent(task.launcher)
    let_children_search()
    if task.forked:
        atexit._clear()  # what the launcher wanted done at its own exit
    _listen_to_the_launcher_alone(channel)
    with _streams(task):
        _take_threads()
        if task.listener is not None:
            os.environ[STORE_FD] = str(task.listener.detach())  # the store closes it
        end = run_entry(partial(_hear_signals_and_run, entry))
        for number in (signal.SIGTERM, signal.SIGUSR1, SAVE_SIGNAL):
            signal.signal(number, no_effect)  # it is ending; nothing to interrupt
        if task.log is not None:
            append_end(task.log, end)
        _report(replace(end, detail=""), channel, waits=task.rank == 0)
    leave(end.code)


def leave(code: int) -> NoReturn:
    """End this process with `code`, after its threads and its exit functions, but without taking torch apart.

    Taking an interpreter that holds torch apart costs 0.3 s, and with a DDP model in it torch 2.13 aborts now and then
    (`terminate called without an active exception`): a finished rank would count as a failed one.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # tells pools of threads to end, then joins all: as at any exit
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # data workers and other children
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _allow_open_files() -> None:
    """Raise the soft limit of open files, often 1,024, as far as the hard one allows: data workers hand over tensors as
    files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_entry(entry: Callable[[], int]) -> End:
    """Run `entry` and return how it ended, whatever it raised."""
    _allow_open_files()
    try:
        return end_of_return(entry(), time.monotonic())
    except BaseException as error:
        # In a frame of its own: a local here would tie error and frames into a cycle, and what the entry held (data
        # workers) would be closed whenever garbage is collected, and in whatever order.
        return _end_of_error(error, time.monotonic())


def _end_of_error(error: BaseException, now: float) -> End:
    hidden = error.__context__ if isinstance(error, _Signalled) else None  # it was failing when it was told to stop
    shown = hidden or error
    return end_of_exception(shown, now, _without_ours(shown.__traceback__))


@contextlib.contextmanager
def signals_stop() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 raise `Stopped` in this process, unless they are handled already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, StartHandler(_raise_stopped))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _raise_stopped(number: int) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}")


def _listen_to_the_launcher_alone(channel: Connection) -> None:
    def stop(number: int) -> None:
        if channel.poll():  # the launcher has announced it: others have failed
            raise _Signalled("stopped by SIGTERM")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # print() may be what was interrupted
                stream.flush()
        die_of(number)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, StartHandler(stop))
    signal.signal(SAVE_SIGNAL, StartHandler(_nothing_to_save))
    faulthandler.enable(file=2)  # a crash in C++ leaves the Python stack behind


def _nothing_to_save(number: int) -> None:
    if os.environ.get("RANK") == "0":
        write_stderr("nothing to save yet")


def _hear_signals_and_run(entry: Callable[[], int]) -> int:
    """The launcher has held signals back, so that none comes before `run_entry` would report it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
    return entry()


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _streams(task: RankTask) -> contextlib.AbstractContextManager[None]:
    if task.log is None or task.rank == 0:
        return streams.doubled(task.log)
    streams.redirect(task.log)
    return contextlib.nullcontext()


def _take_threads() -> None:
    """OMP_NUM_THREADS came too late for a torch that was imported before this process was forked."""
    torch = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if torch is not None and threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def append_end(log: Path, end: End) -> None:
    """Write why a rank failed into its log, with the traceback behind a sentence."""
    if end.text:
        append(log, f"{end.detail}\n\n{end.text}" if end.detail else end.text)


def append(log: Path, text: str) -> None:
    """Append to a rank's log, not to its terminal; an unwritable log is no failure."""
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{masked(text, secrets_in(os.environ))}\n")


def _report(end: End, channel: Connection, waits: bool) -> None:
    """Rank 0 keeps the store that its peers may still talk to: having done, it waits until it is the last."""
    with contextlib.suppress(OSError, EOFError):  # the launcher is gone, and the kernel is about to end this process
        channel.send(end)
        if waits and end.kind is EndKind.DONE:
            channel.recv()
