"""Models that fail in their forward at a given update, once or always."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from kit import small


class Failing(small.Net):
    """Fails on the last rank in update `at`; with a file `once`, in the first round only.

    Args:
        how: "kill", "exit", "stop", "hang", "raise", or "hang in an evaluation" after the update.
    """

    def __init__(self, how: str, at: int, once: str | None = None) -> None:
        super().__init__()
        self._how, self._at, self._once = how, at, Path(once) if once else None
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.updates += self.training
        evaluates = self._how == "hang in an evaluation"
        if (
            self.training is not evaluates
            and int(self.updates) == self._at
            and os.environ.get("RANK") == "1"
            and self._is_first()
        ):
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                return super().forward(points)
            while self._how == "hang" or evaluates:
                time.sleep(0.1)
            if self._how == "exit":
                sys.exit(3)
            raise KeyError("sample 17")
        return super().forward(points)

    def _is_first(self) -> bool:
        if self._once is None:
            return True
        try:
            self._once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
