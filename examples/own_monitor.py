"""A monitor that sends a message when the loss is low, and when the run resumes, ends or fails.

In Python:  lockstep.train(config, monitors=[Messages(print, below=0.1)], ...)
In YAML:    monitors: [{target: own_monitor.py:Messages, arguments: {below: 0.1}}]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lockstep


class Messages(lockstep.extend.Monitor):
    """Sends through `send`: replace it by a function that posts to a chat or a mailbox."""

    def __init__(self, send: Callable[[str], object] = print, below: float = 0.0) -> None:
        self.send = send
        self.below = below
        self.name = ""

    def start(self, info: lockstep.extend.RunInfo) -> None:
        self.name = info.recipe

    def restarted(self, report: lockstep.extend.RestartReport) -> None:
        self.send(f"{self.name}: attempt {report.attempt} resumes from step {report.step}")

    def see(self, report: lockstep.extend.StepReport) -> Iterable[lockstep.extend.Request]:
        if report.loss >= self.below:
            return ()
        self.send(f"{self.name}: loss {report.loss:.3f} at step {report.step}; evaluate")
        self.below = report.loss / 2
        return (lockstep.extend.Request.EVALUATE,)

    def finish(self, error: BaseException | None) -> None:
        self.send(f"{self.name}: {'done' if error is None else f'failed: {error}'}")
