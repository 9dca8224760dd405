"""Deferred signal handlers: in the middle of an update, one that may raise, such as that of Ctrl-C, waits for its end.

    for report in session:
        accumulate    a handler runs at once
        commit        it waits: half an update can't be saved, nor trained on
                      <-- it runs

Outside of an update, and in a program that has no update in its main thread, nothing changes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal.getsignal` makes an enum member of each answer
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_native_id
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_SAME_SIGNAL_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C


class Deferral:
    """The state of the main thread, in the middle of an update or not, and the handlers that wait for its end."""

    def __init__(self) -> None:
        self._active = False
        self._waiting: dict[int, tuple[float, Handler, FrameType | None]] = {}
        self._loops = 0

    def begin(self) -> None:
        """Let handlers wait from now on, if this is the main thread."""
        if get_native_id() != os.getpid():  # without the calls of `threading`: each update asks
            return
        if self._loops and _is_deferrable(_signal.getsignal(_signal.SIGINT)):  # the loop has set another one
            _wrap_sigint()
        self._active = True

    def end(self) -> None:
        """Run the handlers that wait; what they raise leaves this call."""
        if get_native_id() != os.getpid():
            return
        self._active = False
        while self._waiting:
            number, (_, handler, frame) = self._waiting.popitem()
            handler(number, frame)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let handlers wait while the block runs, and on if they waited before."""
        waited = self._active
        self.begin()
        try:
            yield
        finally:
            if not waited:
                self.end()

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Run a handler, now or at the end of the update. A second Ctrl-C during an update doesn't wait."""
        now = time.monotonic()
        since = self._waiting[number][0] if number in self._waiting else now
        if not self._active or (number == signal.SIGINT and now - since > _SAME_SIGNAL_S):
            self._waiting.pop(number, None)
            handler(number, frame)
        else:
            self._waiting[number] = since, handler, frame

    @contextmanager
    def of_sigint(self) -> Iterator[None]:
        """Let the handler of SIGINT, if it is a function, wait for the ends of updates in the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._loops += 1
        if _is_deferrable(signal.getsignal(signal.SIGINT)):
            _wrap_sigint()
        try:
            yield
        finally:
            self._loops -= 1
            handler = signal.getsignal(signal.SIGINT)
            if not self._loops and isinstance(handler, DeferredHandler):
                signal.signal(signal.SIGINT, handler.handler)
            self.end()


DEFERRAL = Deferral()
"""The deferral of this process, whose signals reach its main thread."""


class DeferredHandler:
    """A signal handler that waits for the end of an update."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        DEFERRAL.handle(self.handler, number, frame)


def _is_deferrable(handler: object) -> bool:
    return callable(handler) and not isinstance(handler, DeferredHandler)


def _wrap_sigint() -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler), "a handler in Python"
    signal.signal(signal.SIGINT, DeferredHandler(handler))
