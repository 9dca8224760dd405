"""The learning rate of `schedule.kind: plateau`, which evaluations lower.

    evaluation --> metric --> torch's ReduceLROnPlateau --> the peak of the schedule, from the next update on

Metrics are the same on all ranks, so that all decide the same. A checkpoint keeps the scheduler's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.core.closest import did_you_mean
from lockstep.core.directions import improvement_of
from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.schedule import learning_rate

if TYPE_CHECKING:
    from lockstep.config.schema import Optim, Schedule

KEY = "schedule.plateau"


@dataclass(slots=True)
class PlateauState:
    """The numbers of the scheduler: the current peak, and that of the config; best: None if none was better."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    metric: str
    lr: float
    peak: float
    best: float | None
    num_bad_epochs: int
    cooldown_counter: int


class PlateauRate:
    """The learning rate by progress, as `Rate`, under a peak that evaluations lower."""

    def __init__(self, optim: Optim, schedule: Schedule) -> None:
        assert schedule.plateau is not None
        self.section = schedule.plateau
        self._used, self._peak, self._schedule = optim, optim.lr, schedule
        options = self.section.model_dump(exclude={"metric", "mode"})
        mode = improvement_of(self.section.metric, self.section.mode, f"{KEY}.mode")
        self._group: dict[str, Any] = {"params": [torch.zeros(1)], "lr": optim.lr}
        optimizer = torch.optim.SGD([self._group], lr=optim.lr)
        self._group = optimizer.param_groups[0]
        self._scheduler = ReduceLROnPlateau(optimizer, "max" if mode == "highest" else "min", **options)

    def __call__(self, done: float, step: int, steps: int | None) -> float:
        return learning_rate(self._used, self._schedule, done, step, steps)

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation. Raises ConfigError if its set has no such metric."""
        name = self.section.metric
        if any(key.rpartition(".")[0] == name.rpartition(".")[0] for key in metrics):
            if name not in metrics:
                text = f"the evaluation has no {name}; {did_you_mean(name, metrics)}"
                raise ConfigError(Problem("", f"{KEY}.metric", text))
            self._scheduler.step(metrics[name])
            self._use(self._group["lr"])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        scheduler = self._scheduler
        best = scheduler.best if math.isfinite(scheduler.best) else None
        counts = scheduler.num_bad_epochs, scheduler.cooldown_counter
        return asdict(PlateauState(self.section.metric, self._group["lr"], self._peak, best, *counts))

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state, unless it is about another metric; another peak is lowered as far."""
        if saved is None or saved["metric"] != self.section.metric:
            return
        state = PlateauState(**saved)
        if state.best is not None:
            self._scheduler.best = state.best
        self._scheduler.num_bad_epochs, self._scheduler.cooldown_counter = state.num_bad_epochs, state.cooldown_counter
        self._use(state.lr if state.peak == self._peak else self._peak * state.lr / state.peak)

    def _use(self, lr: float) -> None:
        self._group["lr"] = lr
        self._used = self._used.model_copy(update={"lr": lr})
