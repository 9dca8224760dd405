"""Delays signal handlers that may raise, such as Ctrl-C's, to the end of a step: half a step can't be saved.

Outside of a step, and in a program without one in its main thread, nothing changes.
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
    """The state of the main thread, in a step or not, and the handlers that wait for its end."""

    def __init__(self) -> None:
        self._active = False
        self._waiting: dict[int, tuple[float, Handler, FrameType | None]] = {}
        self._loops = 0

    def begin(self) -> None:
        """Delay handlers from now on, if this is the main thread."""
        if get_native_id() != os.getpid():  # without the calls of `threading`: each update asks
            return
        if self._loops and _is_deferrable(_signal.getsignal(_signal.SIGINT)):  # the loop has set another one
            _wrap_sigint()
        self._active = True

    def end(self) -> None:
        """Run the delayed handlers; they may raise."""
        if get_native_id() != os.getpid():
            return
        self._active = False
        while self._waiting:
            number, (_, handler, frame) = self._waiting.popitem()
            handler(number, frame)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay handlers while the block runs."""
        waited = self._active
        self.begin()
        try:
            yield
        finally:
            if not waited:
                self.end()

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Run a handler now or at the end of the step. A second Ctrl-C doesn't wait."""
        now = time.monotonic()
        since = self._waiting[number][0] if number in self._waiting else now
        if not self._active or (number == signal.SIGINT and now - since > _SAME_SIGNAL_S):
            self._waiting.pop(number, None)
            handler(number, frame)
        else:
            self._waiting[number] = since, handler, frame

    @contextmanager
    def of_sigint(self) -> Iterator[None]:
        """Delay SIGINT's handler, if it is a function, to the ends of steps in the block."""
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
"""The deferral of this process; its signals reach its main thread."""


class DeferredHandler:
    """A signal handler that waits for the end of a step."""

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
