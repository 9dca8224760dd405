"""The end of a run whose evaluations no longer improve.

    evaluation   2.0   1.5   1.6   1.5   1.7      patience 3, min_delta 0
    waited        0     0     1     2     3 --> the run ends after this evaluation

Every rank has the same evaluations, so every rank decides the same. The state is part of each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lockstep.core import formatting
from lockstep.core.closest import closest_match
from lockstep.core.directions import improvement_of, is_better
from lockstep.core.errors import ConfigError, Problem
from lockstep.training.saved_state import EarlyStoppingState

if TYPE_CHECKING:
    from lockstep.config.schema import EarlyStoppingConfig
    from lockstep.core.records import EvaluationReport


class EarlyStopping:
    """Counts the evaluations since the best one.

    Args:
        section: None: the run never ends early.
    """

    def __init__(self, section: EarlyStoppingConfig | None) -> None:
        self.section = section
        self._state = EarlyStoppingState(metric=section.metric if section is not None else "")

    def see(self, evaluations: Iterable[EvaluationReport]) -> None:
        """Take the reports of an evaluation, if there was one. Raises ConfigError if it doesn't have the metric."""
        section, state = self.section, self._state
        if section is None:
            return
        named = [report for report in evaluations if section.metric.startswith(f"{report.name}.")]
        if not named:
            return
        report = max(named, key=lambda report: len(report.name))
        metric = section.metric.removeprefix(f"{report.name}.")
        if metric not in report.metrics:
            known = [f"{report.name}.{name}" for name in report.metrics]
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
        section, state = self.section, self._state
        if section is None or state.waited < section.patience:
            return None
        least = f" by more than {section.min_delta:g}" if section.min_delta else ""
        evaluations = "evaluation" if state.waited == 1 else "evaluations"
        best = "it was never finite" if state.best is None else f"the best is {formatting.value(state.best)}"
        at = "" if state.best is None else f" at step {state.step:,}"
        return f"{section.metric} has not improved{least} in {state.waited} {evaluations}; {best}{at}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self.section is None else {"early_stopping": self._state.model_dump()}

    def restore(self, state: dict[str, Any] | None) -> list[str]:
        """Continue from a checkpoint's state, unless it is about another metric; return notes for the user."""
        if self.section is not None and state is not None and state["metric"] == self.section.metric:
            self._state = EarlyStoppingState.model_validate(state)
        if self.reason is None or self.section is None:
            return []
        return [
            f"monitor.early_stopping ends the run at once: {self.reason}; to train it further, set "
            f"monitor.early_stopping.patience above {self._state.waited} (it is {self.section.patience}) or "
            "monitor.early_stopping to null; --fresh starts over"
        ]

    def _improves(self, value: float) -> bool:
        section, best = self.section, self._state.best
        assert section is not None
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        direction = improvement_of(section.metric, section.mode)
        return is_better(value, best, direction) and abs(value - best) > section.min_delta
