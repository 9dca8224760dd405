"""The end of a run whose evaluations no longer improve.

    evaluation   2.0   1.5   1.6   1.5   1.7      patience 3, min_delta 0
    waited        0     0     1     2     3 --> the run ends after this evaluation

Every rank has the same evaluations, so every rank decides the same. The state is part of each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.retention import is_better
from lockstep.core import formatting
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.training.saved_state import EarlyStoppingState

if TYPE_CHECKING:
    from lockstep.config.schema import EarlyStoppingConfig
    from lockstep.core.records import EvaluationReport

_BEST_IS: dict[str, Any] = {"auto": "auto", "min": "lowest", "max": "highest"}


class EarlyStopping:
    """Counts the evaluations since the best one.

    Args:
        section: None: the run never ends early.
    """

    def __init__(self, section: EarlyStoppingConfig | None) -> None:
        self._section = section
        self._state = EarlyStoppingState(metric=section.metric if section is not None else "")

    @property
    def metrics(self) -> list[tuple[str, str]]:
        """Key of the config and its metric, if there is one."""
        return [] if self._section is None else [("monitor.early_stopping.metric", self._section.metric)]

    def see(self, evaluations: Iterable[EvaluationReport]) -> None:
        """Take the reports of an evaluation, if there was one. Raises ConfigError if it doesn't have the metric."""
        section, state = self._section, self._state
        if section is None:
            return
        evaluation, _, metric = section.metric.partition(".")
        for report in evaluations:
            if report.name != evaluation:
                continue
            if metric not in report.metrics:
                known = [f"{evaluation}.{name}" for name in report.metrics]
                near = closest_match(section.metric, known)
                hint = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
                text = f"the evaluation has no {section.metric}; {hint}"
                raise ConfigError(Problem("", "monitor.early_stopping.metric", text))
            value = report.metrics[metric]
            if self._improves(value):
                state.best, state.step, state.waited = value, report.step, 0
            else:
                state.waited += 1

    @property
    def reason(self) -> str | None:
        """The reason for which the run ends now; None: it continues."""
        section, state = self._section, self._state
        if section is None or state.waited < section.patience:
            return None
        least = f" by more than {section.min_delta:g}" if section.min_delta else ""
        evaluations = "evaluation" if state.waited == 1 else "evaluations"
        best = "it was never finite" if state.best is None else f"the best is {formatting.value(state.best)}"
        at = "" if state.best is None else f" at step {state.step:,}"
        return f"{section.metric} has not improved{least} in {state.waited} {evaluations}; {best}{at}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self._section is None else {"early_stopping": self._state.model_dump()}

    def restore(self, state: dict[str, Any] | None) -> list[str]:
        """Continue from a checkpoint's state, unless it is about another metric; return notes for the user."""
        if self._section is not None and state is not None and state["metric"] == self._section.metric:
            self._state = EarlyStoppingState.model_validate(state)
        if self.reason is None or self._section is None:
            return []
        return [
            f"monitor.early_stopping ends the run at once: {self.reason}; to train it further, set "
            f"monitor.early_stopping.patience above {self._state.waited} (it is {self._section.patience}) or "
            "monitor.early_stopping to null; --fresh starts over"
        ]

    def _improves(self, value: float) -> bool:
        section, best = self._section, self._state.best
        assert section is not None
        if not math.isfinite(value):
            return False
        best_is = _BEST_IS[section.mode]
        if best is None:
            return True
        return is_better(value, best, section.metric, best_is) and abs(value - best) > section.min_delta
