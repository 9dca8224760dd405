"""The evaluations of a run: which one is due, and what their metrics decide.

    update 6 --> the interval is over? a clock has requested it? --> due --> evaluated --> best so far? early stopping?

A state saved while one is due has `evaluation_due`: the run that resumes begins with it. Metrics are the same on every
rank, so every rank decides the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from lockstep.core import formatting
from lockstep.core.closest import did_you_mean
from lockstep.core.directions import best_of, improvement_of, is_better, known_direction
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import EvaluationReport, Request, StepReport
from lockstep.loop.plateau import KEY as PLATEAU
from lockstep.loop.plateau import PlateauRate
from lockstep.loop.session import Session, components_of
from lockstep.models.metrics import own_metrics
from lockstep.monitor.jsonl import finite
from lockstep.plan.schedule import is_due, updates_until

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.config.every import Every
    from lockstep.config.schema import EarlyStoppingConfig
    from lockstep.core.progress import Progress


@dataclass(slots=True)
class EarlyStoppingState:
    """The best value so far (None: none was finite), the step of its evaluation, and evaluations since then."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    metric: str
    best: float | None = None
    step: int = 0
    waited: int = 0


class EarlyStopping:
    """Counts the evaluations since the best one; without a config section, the run never ends early."""

    def __init__(self, section: EarlyStoppingConfig | None) -> None:
        self.section = section
        self._state = EarlyStoppingState(section.metric if section is not None else "")

    def see(self, evaluations: Sequence[EvaluationReport]) -> None:
        """Take the reports of an evaluation. Raises ConfigError if its set has no such metric."""
        section, state, metrics = self.section, self._state, _metrics(evaluations)
        if section is None or not any(section.metric.startswith(f"{report.name}.") for report in evaluations):
            return
        if section.metric not in metrics:
            text = f"the evaluation has no {section.metric}; {did_you_mean(section.metric, metrics)}"
            raise ConfigError(Problem("", "monitor.early_stopping.metric", text))
        value = metrics[section.metric]
        if self._improves(section, value):
            state.best, state.step, state.waited = value, evaluations[0].step, 0
        else:
            state.waited += 1

    @property
    def reason(self) -> str | None:
        """The reason to end the run now; None: it continues."""
        section, state = self.section, self._state
        if section is None or state.waited < section.patience:
            return None
        least = f" by more than {section.min_delta:g}" if section.min_delta else ""
        best = f"the best is {formatting.value(state.best)} at step {state.step:,}" if state.best is not None else ""
        waited = formatting.counted(state.waited, "evaluation")
        return f"{section.metric} has not improved{least} in {waited}; {best or 'it was never finite'}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self.section is None else {"early_stopping": asdict(self._state)}

    def restore(self, state: dict[str, Any] | None) -> list[str]:
        """Continue from a checkpoint's state, unless it is about another metric; return notes for the user."""
        if self.section is not None and state is not None and state["metric"] == self.section.metric:
            self._state = EarlyStoppingState(**state)
        if self.reason is None:
            return []
        return [
            f"monitor.early_stopping ends the run at once: {self.reason}; to train it further, raise "
            f"monitor.early_stopping.patience above {self._state.waited}, or set monitor.early_stopping to null"
        ]

    def _improves(self, section: EarlyStoppingConfig, value: float) -> bool:
        best = self._state.best
        if best is None or not math.isfinite(value):
            return math.isfinite(value)
        direction = improvement_of(section.metric, section.mode)
        return is_better(value, best, direction) and abs(value - best) > section.min_delta


class Evaluations:
    """The evaluations of one run, on one rank; all ranks call the same methods at the same updates.

    Attributes:
        reports: of the last evaluation; empty before one.
        trigger: requests an evaluation by the clock, and knows which updates one follows.
        best_at: the step with the best metric so far, in this attempt, or of the checkpoint that it has resumed from.
    """

    def __init__(self, session: Session) -> None:
        components = components_of(session)
        self._session = session
        self._section = components.config.checkpoint
        self.trigger = self._new_trigger(None)
        self._last = session.progress  # at the last evaluation, or at the beginning
        self._is_requested = False
        self._best: float | None = None
        self.best_at: int | None = None
        self.early_stopping = EarlyStopping(components.config.monitor.early_stopping)
        rate = components.update.rate
        self._plateau = rate if isinstance(rate, PlateauRate) else None
        self.reports: tuple[EvaluationReport, ...] = ()

    def refuse_unknown_metrics(self) -> None:
        """Raise ConfigError if the config names a metric that no evaluation will have, or without a direction."""
        checkpoint, stopping = self._section, self.early_stopping.section
        if checkpoint.best is not None:
            self._refuse_unknown_metric("checkpoint.best", checkpoint.best)
            if best_of(checkpoint.best, checkpoint.best_is) and checkpoint.best_is == "auto":
                self._refuse_direction("checkpoint.best_is", checkpoint.best, "highest", "lowest")
        if stopping is not None:
            self._refuse_unknown_metric("monitor.early_stopping.metric", stopping.metric)
            if improvement_of(stopping.metric, stopping.mode) and stopping.mode == "auto":
                self._refuse_direction("monitor.early_stopping.mode", stopping.metric, "max", "min")
        if self._plateau is not None:
            self._refuse_unknown_metric(f"{PLATEAU}.metric", self._plateau.section.metric)
            if self._plateau.section.mode == "auto":
                self._refuse_direction(f"{PLATEAU}.mode", self._plateau.section.metric, "max", "min")

    def _refuse_direction(self, key: str, metric: str, highest: str, lowest: str) -> None:
        """Raise ConfigError if torchmetrics has another direction than the name of a metric shows."""
        parts = components_of(self._session).evaluation
        named = {**parts.metrics.directions, **(parts.answers.metrics.directions if parts.answers else {})}
        own = next((best for name, best in named.items() if metric.rpartition(".")[2].startswith(name)), None)
        if own is not None and own != known_direction(metric):
            words = highest if own == "highest" else lowest
            raise ConfigError(Problem("", key, f"{metric} is best where it is {own}, unlike its name; write {words}"))

    def _refuse_unknown_metric(self, key: str, name: str) -> None:
        components = components_of(self._session)
        if (metrics := own_metrics(components.objective)) is None:
            return
        further, answers = components.evaluation.metrics, components.evaluation.answers
        if not further.names and any(name.rpartition(".")[2].startswith(own) for own in further.directions):
            return  # of a user's objective: known when it is evaluated
        metrics += [*further.names, *(answers.metrics.names if answers else ())]
        known = [f"{evaluation}.{metric}" for evaluation in components.evaluation.sets for metric in metrics]
        if name not in known:
            raise ConfigError(Problem("", key, f"no evaluation will have {name}; {did_you_mean(name, known)}"))

    def restore(self, manifest: Manifest) -> list[str]:
        """Continue from a checkpoint; return notes for the user. Its best value counts if it is of the same metric."""
        section = manifest.config.get("checkpoint")
        if isinstance(section, Mapping) and section.get("best") == self._section.best:
            self._best = manifest.state.get("best")
        self._is_requested = manifest.state.get("evaluation_due", False)
        self.reports = _reports_in(manifest, list(components_of(self._session).evaluation.sets))
        if self._best is not None and manifest.metrics.get(self._section.best or "") == self._best:
            self.best_at = manifest.step
        if self._plateau is not None:
            self._plateau.restore(manifest.state.get("plateau"))
        return self.early_stopping.restore(manifest.state.get("early_stopping"))

    def schedule(self) -> None:
        """Let `evaluation.every` decide from now on; in a custom loop, the loop decides."""
        components = components_of(self._session)
        self.trigger = self._new_trigger(components.config.evaluation.every if components.evaluation.sets else None)
        self._last = self._session.progress

    def _new_trigger(self, every: Every | None) -> Trigger:
        components = components_of(self._session)
        return Trigger(every, Request.EVALUATE, components.plan.epoch_samples, components.world.rank)

    def receive(self, report: StepReport) -> None:
        """Take the requests of all ranks that came with a report."""
        self._is_requested |= Request.EVALUATE in report.requests

    @property
    def due(self) -> bool:
        """True if an evaluation follows the last update, and hasn't ended yet."""
        return self._is_requested or self.trigger.follows(self._last, self._session.progress)

    @property
    def comes_first(self) -> bool:
        """True if a run that has resumed begins with an evaluation, not with an update."""
        trains = not self._session.finished and self.early_stopping.reason is None
        at_end = components_of(self._session).config.evaluation.at_end
        return self.due or (at_end and not trains and not self.is_done)

    @property
    def is_done(self) -> bool:
        """True if the state after the last update was evaluated."""
        return any(report.step == self._session.progress.steps for report in self.reports)

    @property
    def is_best(self) -> bool:
        """True if the evaluation after the last update has the best metric so far."""
        return self.best_at == self._session.progress.steps

    def take(self, reports: Sequence[EvaluationReport], *, at_end: bool = False) -> None:
        """Take the reports of the evaluation after the last update; at the run's end it stops nothing early."""
        if not at_end:
            self.early_stopping.see(reports)
            if self._plateau is not None:
                self._plateau.see(_metrics(reports))
        self.reports = tuple(reports)
        self._note_best()
        self._last, self._is_requested = self._session.progress, False
        self.trigger.restart()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of the state after the last update keeps."""
        plateau = {} if self._plateau is None else {"plateau": self._plateau.state()}
        return {"best": self._best, "evaluation_due": self.due, **self.early_stopping.state(), **plateau}

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the state after the last update by `set.metric`; empty if it wasn't evaluated."""
        metrics: dict[str, Any] = finite(_metrics(self.reports) if self.is_done else {})
        return metrics

    def _note_best(self) -> None:
        name = self._section.best
        metric = _metrics(self.reports).get(name) if name else None
        if name is None or metric is None or not math.isfinite(metric):
            return
        if self._best is None or is_better(metric, self._best, best_of(name, self._section.best_is)):
            self._best, self.best_at = metric, self._session.progress.steps


def _metrics(reports: Iterable[EvaluationReport]) -> dict[str, float]:
    return {f"{report.name}.{name}": value for report in reports for name, value in report.metrics.items()}


def _reports_in(manifest: Manifest, names: Sequence[str]) -> tuple[EvaluationReport, ...]:
    """Return the reports of the evaluation at a checkpoint's step, if it has all sets; empty if not."""
    metrics: dict[str, dict[str, float]] = {}
    for key, value in manifest.metrics.items():
        name = max((name for name in names if key.startswith(f"{name}.")), key=len, default=None)
        if name is not None:
            metrics.setdefault(name, {})[key.removeprefix(f"{name}.")] = math.nan if value is None else value
    if metrics.keys() != set(names):
        return ()
    return tuple(EvaluationReport(name, manifest.step, metrics[name], 0, 0.0) for name in names)


_LOST_AFTER = 16  # looks at the clock; a request that isn't followed by then was lost with its vote


class OpenRequest:
    """A request by the clock, made once until it is followed: votes, and on GPUs their results, come an update late."""

    def __init__(self) -> None:
        self.looks_left = 0

    def is_made(self, *, due: bool) -> bool:
        """Return whether to make it now; called at each look at the clock."""
        self.looks_left = max(0, self.looks_left - 1)
        if not due or self.looks_left:
            return False
        self.looks_left = _LOST_AFTER
        return True

    def close(self) -> None:
        """Note that it was followed, or refused."""
        self.looks_left = 0


class Trigger:
    """Decides which updates an evaluation or a save follows; without `every`, only after requested ones."""

    def __init__(self, every: Every | None, request: Request, epoch_samples: int, rank: int) -> None:
        self._every = every
        self._request = request
        self._epoch_samples = epoch_samples
        self._seconds = every.number * 60 if rank == 0 and every is not None and every.unit == "minutes" else math.inf
        self._open = OpenRequest()
        self.restart()

    def restart(self) -> None:
        """Count minutes from now on, because it was done."""
        self._began = time.monotonic()
        self._open.close()

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's request for the next vote, if its minutes are over; called at each look at the clock."""
        if self._seconds == math.inf:
            return ()
        is_due = time.monotonic() - self._began >= self._seconds
        is_asked = (is_due or self._open.looks_left) and self._open.is_made(due=is_due)
        return (self._request,) if is_asked else ()

    def follows(self, before: Progress, now: Progress, requests: Collection[Request] = ()) -> bool:
        """Return whether it follows the update between `before` and `now`, or was requested of all ranks."""
        if self._request in requests:
            return True
        every = self._every
        return every is not None and every.unit != "minutes" and is_due(every, before, now, self._epoch_samples)

    def updates_left(self, now: Progress, most: int) -> float:
        """Return how many further updates of at most `most` samples it takes at least until it follows one."""
        return math.inf if self._every is None else updates_until(self._every, now, self._epoch_samples, most)
