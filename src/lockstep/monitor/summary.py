"""What a run came to: the object on the last line of `--json`, and RUN/summary.json, which marks a finished run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.core.progress import Progress
from lockstep.core.records import EvaluationReport, RunInfo, StepReport
from lockstep.monitor.jsonl import finite


def summarize(
    facts: RunInfo,
    progress: Progress,
    last: StepReport | None,
    evaluations: Iterable[EvaluationReport],
    seconds: float,
) -> dict[str, Any]:
    """The final object; valid JSON (what isn't finite is null).

    `evaluation` holds the last evaluation's metrics by name (`{"loss": ..., "accuracy": ...}`); if there are several
    sets, by set and name (`{"held-out": {"loss": ...}, ...}`); without evaluations it is empty. `loss` is the last
    update's, `seconds` the wall clock of the run over all its attempts, evaluations included.
    """
    summary: dict[str, Any] = finite(
        {
            "run": facts.folder,
            "recipe": facts.recipe,
            "steps": progress.steps,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "seconds": round(seconds, 3),
            "evaluation": metrics_by_set(evaluations),
            "loss": last.loss if last else None,
            "discarded": last.discarded if last else 0,
            "strategy": facts.strategy,
            "ranks": facts.ranks,
            "backend": facts.backend,
            "device": facts.device,
            "precision": facts.precision,
            "global_size": facts.global_size,
            "parameters": facts.parameters,
            "trainable": facts.trainable,
        }
    )
    return summary


def metrics_by_set(evaluations: Iterable[EvaluationReport]) -> Mapping[str, Any]:
    """The metrics of a single set by name; of several, by set and name."""
    latest = {report.name: dict(report.metrics) for report in evaluations}
    return next(iter(latest.values())) if len(latest) == 1 else latest
