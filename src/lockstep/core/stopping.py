"""Handles signals while there is nothing to save yet: one sentence, exit code 130, at once.

    command starts ---- imports, checks, run folder, ranks ---- first update -------------------------- done
    SIGTERM, ...        undo, one sentence, exit code 130       `resilience.signals`: stop and save     no effect
    SIGUSR2             no effect                               save and continue                       no effect

An exception raised by a signal handler would be lost or change its meaning depending on where it arrives: an import
turns it into another error, a destructor swallows it, C++ aborts. Until the first update a run has nothing that a
SIGKILL would damage, so the process just ends.

Imports nothing that takes time: the command installs these handlers before anything else.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # importing `typing` takes longer than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAVE_SIGNAL = signal.SIGUSR2
INHERITED_IF_IGNORED = (signal.SIGINT, signal.SIGHUP)  # by a job in the background, and under nohup

_EXIT_CODE = 130  # of `core.errors.Stopped`, which would have to be imported


class StartHandler:
    """A signal handler of the time before the first update.

    A process forked from this one handles the signal as processes do that don't handle it.

    Args:
        act: called with the signal's number.
    """

    def __init__(self, act: Callable[[int], None]) -> None:
        self._process = os.getpid()
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._act(number)
        else:
            die_of(number)


def no_effect(number: int, frame: FrameType | None) -> None:
    """A signal handler. Unlike SIG_IGN it isn't inherited by programs that this process starts."""


def die_of(number: int) -> None:
    """End this process by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)


def is_handled(number: int) -> bool:
    """Return whether this process handles the signal: SIGINT and SIGHUP stay ignored if its parent has them ignored."""
    return number not in INHERITED_IF_IGNORED or signal.getsignal(number) != signal.SIG_IGN


@contextmanager
def blocked_signals(*, forks: bool) -> Iterator[None]:
    """Block signals until the block is left; processes started within unblock them when they are ready.

    Args:
        forks: the processes are forked. Otherwise multiprocessing starts a process to track resources beside the first,
            and lets signals in when it has.
    """
    if not forks:
        from multiprocessing import resource_tracker

        from lockstep.core.safe_path import safe_interpreters

        with safe_interpreters(), blocked_signals(forks=True):  # signals to the group don't end it
            resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_at_once() -> None:
    """Make stop signals end this command: with what `undo_on_stop` registered, one sentence, and exit code 130."""
    for number in STOP_SIGNALS:
        if is_handled(number):
            signal.signal(number, StartHandler(_stop))
    signal.signal(SAVE_SIGNAL, StartHandler(_nothing_to_save))


@contextmanager
def undo_on_stop(undo: Callable[[], None]) -> Iterator[None]:
    """Let a signal that ends the command while the block runs call `undo` first. It runs inside a signal handler."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


_undone: list[Callable[[], None]] = []


def _stop(number: int) -> None:
    for step in (*reversed(_undone), sys.stdout.flush):
        with suppress(Exception):  # what can't be undone stays
            step()
    write_stderr(f"stopped by {signal.Signals(number).name}")
    os._exit(_EXIT_CODE)


def _nothing_to_save(number: int) -> None:
    write_stderr("nothing to save yet")


def write_stderr(text: str) -> None:
    """Print from a signal handler, which may have interrupted print()."""
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"lockstep: {text}\n".encode())
