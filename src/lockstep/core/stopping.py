"""Signals before the first step, and processes that end together.

    command starts ---- imports, checks, run folder, ranks ---- first step ---------------------------- done
    SIGTERM, SIGUSR1    undo, one sentence, exit code 75        `resilience.signals`: stop and save     no effect
    SIGINT, SIGHUP      the same, exit code 130                 the same                                no effect
    SIGUSR2             no effect                               save and continue                       no effect

SIGTERM and SIGUSR1 are what schedulers send: exit code 75 asks them to start the run again. An exception raised by a
signal handler could be lost or change its meaning (in an import, a destructor, C++), so the process just ends.

The command imports this module first, so it imports nothing slow.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from time import monotonic

TYPE_CHECKING = False  # importing `typing` takes longer than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAVE_SIGNAL = signal.SIGUSR2
STACKS_SIGNAL = signal.SIGRTMIN + 7  # on it, a rank writes its stacks

_INHERITED_IF_IGNORED = (signal.SIGINT, signal.SIGHUP)  # by a job in the background, and under nohup
_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
_CODE, _CODE_OF_SCHEDULERS = 130, 75  # of `core.errors.Stopped` and `Paused`, which would have to be imported
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SAME_REQUEST = 0.5  # seconds: signals this close are one request (timeout(1) and shells signal process and group)

_undo_steps: list[Callable[[], None]] = []
_codes: list[int] = []


def code_at_once() -> int:
    """Return the exit code of this command, for an undo step of `undo_on_stop`."""
    return _codes[-1] if _codes else _CODE


def stop_code(number: int) -> int:
    """Return the exit code of a run that a signal stopped before it had anything to save."""
    return _CODE_OF_SCHEDULERS if number in _SCHEDULERS else _CODE


class StartHandler:
    """A signal handler until the first step. In a forked process the signal has its default action."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._process = os.getpid()
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._act(number)
        else:
            die_of(number)


class SignalRequests:
    """Numbers of requests by signals to stop, or to save and continue, here and on other hosts.

    `fileno` is readable when there are new ones here.

    Attributes:
        passed_saves: Requests to save that ranks have received, of this round or one before.
        last_stop: The last signal that requested a stop.
        patience: Seconds that the ranks have to stop after the first request.
    """

    def __init__(self, patience: float = inf) -> None:
        self.patience = patience
        self.own_stops = self.own_saves = self.passed_saves = self.other_stops = self.other_saves = 0
        self.last_stop: signal.Signals | None = None
        self._stopped_at = -inf
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    @property
    def stops(self) -> int:
        """Number of requests to stop; a scheduler's signal to each host is one."""
        return max(self.own_stops, self.other_stops)

    @property
    def saves(self) -> int:
        return self.own_saves + self.other_saves

    def fileno(self) -> int:
        return self._read

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal. After SIGUSR1, a scheduler's warning, the limit's own signal is the same request."""
        now, stop = monotonic(), signal.Signals(number)
        warned = self.last_stop is signal.SIGUSR1 and stop is not signal.SIGUSR1
        if now - self._stopped_at >= _SAME_REQUEST:
            self._stopped_at, self.last_stop = now, stop
            self.own_stops += not warned
        self._wake()

    def save(self, number: int, frame: FrameType | None) -> None:
        """Handle a save signal."""
        self.own_saves += 1
        self._wake()

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: the launcher wakes anyway
            os.write(self._write, b"!")


def no_effect(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, programs that this process starts don't inherit it."""


def die_of(number: int) -> None:
    """End this process by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)


@contextmanager
def handled_signals(stop: Handler, save: Handler, *, last: bool = True) -> Iterator[None]:
    """Handle stop signals and SIGUSR2 while the block runs, if this is the main thread.

    SIGINT and SIGHUP stay ignored if the parent has them ignored. Afterwards the earlier handlers are restored.

    Args:
        last: The command ends after the block: don't restore its own handlers, which would change the exit code.
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS if _is_handled(number)}
    before[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, save)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: C code has set it, and Python can't restore it
            is_over = handler is None or (last and isinstance(handler, StartHandler))
            signal.signal(number, no_effect if is_over else handler)


@contextmanager
def blocked_signals(*, forks: bool) -> Iterator[None]:
    """Block signals in the block; processes that it starts unblock them when they are ready.

    Args:
        forks: The processes are forked. If not, multiprocessing's resource tracker is started first.
    """
    if not forks:
        from multiprocessing import resource_tracker

        from lockstep.core.safe_path import safe_interpreters

        with safe_interpreters(), blocked_signals(forks=True):  # signals to the process group don't end it
            resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_at_once(*, trains: bool = False) -> None:
    """Make stop signals end this command: call what `undo_on_stop` registered, print one sentence, exit.

    Args:
        trains: The command trains, so that a scheduler is to start it again.
    """
    for number in STOP_SIGNALS:
        if _is_handled(number):
            code = stop_code(number) if trains else _CODE
            signal.signal(number, StartHandler(partial(_stop, code)))
    signal.signal(SAVE_SIGNAL, StartHandler(lambda number: write_stderr("nothing to save yet")))


@contextmanager
def undo_on_stop(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` inside the signal handler if a signal ends the command during the block."""
    _undo_steps.append(undo)
    try:
        yield
    finally:
        _undo_steps.remove(undo)


def write_stderr(text: str) -> None:
    """Print from a signal handler, which may have interrupted print()."""
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"lockstep: {text}\n".encode())


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def exit_with_process(process: int) -> None:
    """Exit when a process ends that isn't the parent."""
    import select
    import threading

    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def wait_and_exit() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait_and_exit, name="exit-with-process", daemon=True).start()


def _is_handled(number: int) -> bool:
    return number not in _INHERITED_IF_IGNORED or signal.getsignal(number) != signal.SIG_IGN


def _stop(code: int, number: int) -> None:
    _codes.append(code)
    for step in (*reversed(_undo_steps), sys.stdout.flush):
        with suppress(Exception):  # what can't be undone stays
            step()
    write_stderr(f"stopped by {signal.Signals(number).name}")
    os._exit(code)
