"""Waits for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lockstep.core.protocols import Monitor
from lockstep.core.records import Request, StepReport

UNHURRIED = "monitors=[{target: kit.waiting:Unhurried}]"
"""For a run that lasts until a test stops it: it would keep the processors busy, and save hundreds of times."""


class Unhurried(Monitor):
    """Lets an update take 20 ms."""

    def see(self, report: StepReport) -> Iterable[Request]:
        time.sleep(0.02)
        return ()


def wait_for(paths: list[Path], seconds: float = 20.0) -> None:
    """Wait until all paths exist."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"still missing: {[path for path in paths if not path.exists()]}"
        time.sleep(0.01)


def wait_until(moment: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not moment():
        assert time.monotonic() < deadline, "it doesn't come"
        time.sleep(0.01)
