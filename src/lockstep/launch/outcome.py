"""The result of a launch: an exit code and a message for a command, an exception for a program."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import ConfigError, Failure, Paused, Problem, RunFailed, Stopped, VerificationError
from lockstep.core.terminal import echo


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The result of a launch.

    Attributes:
        code: the exit code; 0: done.
        text: why it isn't: a message, or a traceback behind the name of its rank.
        is_traceback: of `text`.
        problems: of a ConfigError that all ranks agree on.
        logs: where each rank's output is, if a look at it helps.
    """

    code: int
    text: str = ""
    is_traceback: bool = False
    problems: tuple[Problem, ...] = ()
    logs: Path | None = None

    def show(self) -> int:
        """Print on stderr why it isn't done; return the exit code."""
        if self.text:
            print_on_stderr(self.text if self.is_traceback else f"lockstep: {self.text}")
        if self.logs is not None:
            print_on_stderr(f"each rank's output is in {self.logs}")
        return self.code

    def failure(self) -> Failure:
        """Return what `lockstep.train` raises. A rank's traceback is shown, and its last line becomes the message."""
        if self.code == ConfigError.exit_code:
            return ConfigError(self.problems or self.text or f"the run ended with exit code {self.code}")
        for kind in (Paused, Stopped, VerificationError):
            if self.code == kind.exit_code:
                return kind(self.text or "stopped")
        return RunFailed(f"{self._reason()}; each rank's output is in {self.logs}" if self.logs else self._reason())

    def _reason(self) -> str:
        if not self.is_traceback:
            return self.text or f"the run ended with exit code {self.code}"
        print_on_stderr(self.text)
        return self.text.splitlines()[-1]


def print_on_stderr(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed is no reason to fail
        echo(text, file=sys.stderr, flush=True)
