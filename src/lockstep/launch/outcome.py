"""The result of a launch: an exit code and a message for a command, an exception for a program."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.core.errors import (
    ConfigError,
    Failure,
    Paused,
    Problem,
    RunFailed,
    Stopped,
    VerificationError,
    message_of,
)
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.stopping import stop_code
from lockstep.core.terminal import echo

_EXCEPTION = re.compile(r"^(?: *\| )?([A-Za-z_][\w.<>]*(?:: .*)?)$", re.MULTILINE)
"""The line of a traceback that has the exception; in a group, behind a bar."""
_LONGEST = 500  # characters


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The result of a launch.

    Attributes:
        text: Why it isn't done: a message, or a traceback after the name of its rank.
        logs: The folder of each rank's output, if that helps.
        advice: The advice of an OutOfMemory, which `text` contains.
        cut_off: Whether a stop signal has ended ranks that could not save.
    """

    kind: FailureKind
    text: str = ""
    is_traceback: bool = False
    problems: tuple[Problem, ...] = ()
    logs: Path | None = None
    advice: str = ""
    cut_off: bool = False

    @classmethod
    def of(cls, failure: Failure) -> LaunchResult:
        """Return the result of a run that a failure of its launcher has ended."""
        return cls(failure.kind, message_of(failure))

    @property
    def code(self) -> int:
        """The exit code; 0 if the run is done."""
        return self.kind.exit_code

    def show(self) -> int:
        """Print on stderr why the run isn't done; return the exit code."""
        if self.text:
            print_on_stderr(self.text if self.is_traceback else f"lockstep: {self.text}")
        if self.logs is not None:
            print_on_stderr(f"each rank's output is in {self.logs}")
        return self.code

    def failure(self) -> Failure:
        """Return the exception for `lockstep.train`. A traceback is printed, and its last line is the message."""
        reason = self.text or f"the run ended with exit code {self.code}"
        if self.code == ConfigError.exit_code:
            return ConfigError(self.problems or reason, self.kind)
        for failure in (Paused, Stopped, VerificationError):
            if self.code == failure.exit_code:
                return failure(self.text or "stopped", kind=self.kind)
        if self.is_traceback:
            print_on_stderr(self.text)
            reason = gist(self.text)
        return RunFailed(f"{reason}; each rank's output is in {self.logs}" if self.logs else reason, kind=self.kind)


def gist(text: str) -> str:
    """Return a message's first line, with the others if it ends in a colon; of a traceback, its last exception."""
    lines = text.strip().splitlines() or [""]
    if "Traceback (" in text:
        raised = _EXCEPTION.search(text.rpartition("Traceback (")[2])
        rank = "" if "Traceback (" in lines[0] else lines[0]
        lines[0] = f"{rank} {raised[1] if raised else lines[-1].strip()}".strip()
    elif lines[0].endswith(":"):
        lines[0] = f"{lines[0]} {'; '.join(line.strip() for line in lines[1:] if line.strip())}".rstrip()
    return lines[0][:_LONGEST]


def stopped_by(number: signal.Signals) -> LaunchResult:
    """Return the result of a launch that a signal has stopped while its ranks didn't run."""
    return LaunchResult(kind_of_stop(stop_code(number)), f"stopped by {number.name}")


def kind_of_stop(code: int) -> FailureKind:
    """Return how a run ends that was stopped with this exit code."""
    return FailureKind.PAUSED if code == Paused.exit_code else FailureKind.STOPPED


def print_on_stderr(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal is no reason to fail
        echo(text, file=sys.stderr, flush=True)


def report_to_torchrun(failure: Failure) -> None:
    """Write the failure to torchrun's error file, so that its report ends with the message."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    # as torch.distributed.elastic.multiprocessing.errors writes it, without a traceback
    report = {"message": {"message": message_of(failure), "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps(report), encoding="utf-8")


def exit_with(failure: Failure) -> NoReturn:
    """End this process with the failure's exit code, and its message on stderr without a traceback.

    Under torchrun the message is also the last line of torchrun's report.

        try:
            lockstep.train(...)
        except lockstep.Failure as failure:
            lockstep.exit_with(failure)
    """
    report_to_torchrun(failure)
    with contextlib.suppress(OSError):  # the terminal may have been closed
        sys.stdout.flush()
        echo(f"{Path(sys.argv[0]).name}: {message_of(failure)}", file=sys.stderr)
    sys.exit(failure.exit_code)
