"""The result of each run: a row, as text and as JSON.

strategy  ranks  micro-batches  optimizer      loss     norm  gradient   weights
ddp           2              1  adamw       5.1e-08  1.2e-07   3.0e-07   2.1e-04  passed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.core.formatting import counted
from lockstep.proof.cases import Case, by_reason
from lockstep.proof.diagnosis import diagnose
from lockstep.proof.evidence import Evidence
from lockstep.proof.tolerances import Tolerance

Status = Literal["passed", "failed", "refused", "crashed"]


@dataclass(frozen=True, slots=True)
class Row:
    """One run compared with the single process. Differences are the largest of all steps; None where nothing ran.

    Attributes:
        accumulation: Micro-batches per rank.
        max_loss_difference, max_norm_difference: Relative.
        max_gradient_difference: Of a parameter, relative to its gradient's norm.
        max_weight_difference: Of a parameter after the last step: root mean square over the summed learning rate.
        max_element_difference: The same of a single element.
        passed: None if the strategy refused.
        step: The first step that deviates, from 1; 0: the initial weights.
        parameter: The first parameter that deviates at this step, if one does.
        what: The deviation, in a sentence.
        reason: Its likely cause; or why the run was refused, or how it crashed.
    """

    strategy: str
    ranks: int
    optimizer: str
    accumulation: int
    status: Status
    passed: bool | None
    steps: int = 0
    max_loss_difference: float | None = None
    max_norm_difference: float | None = None
    max_gradient_difference: float | None = None
    max_weight_difference: float | None = None
    max_element_difference: float | None = None
    step: int | None = None
    parameter: str | None = None
    what: str | None = None
    reason: str | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain values; numbers that JSON can't represent (NaN, infinity) as text."""
        fields = asdict(self)
        not_finite = {
            name: repr(value) for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)
        }
        return fields | not_finite


def row_of(case: Case, evidence: Evidence, tolerance: Tolerance, seconds: float) -> Row:
    """Return the row of a run that was compared, to its end or until it failed."""
    deviation = diagnose(evidence, tolerance)
    steps = evidence.steps
    last = next((step.weights for step in reversed(steps) if step.weights is not None), None)
    return Row(
        strategy=case.strategy,
        ranks=case.ranks,
        optimizer=case.optimizer,
        accumulation=case.accumulation,
        status="failed" if deviation else "passed",
        passed=deviation is None,
        steps=len(steps),
        max_loss_difference=largest(step.loss_difference for step in steps if step.run.reported),
        max_norm_difference=largest(step.norm_difference for step in steps if step.run.reported),
        max_gradient_difference=largest(step.gradient.worst for step in steps),
        max_weight_difference=None if last is None else last.worst,
        max_element_difference=None if last is None else last.largest / (evidence.summed_rate or 1.0),
        seconds=seconds,
        **(asdict(deviation) if deviation else {}),
    )


def not_run(case: Case, status: Literal["refused", "crashed"], reason: str) -> Row:
    """Return the row of a run that has no evidence."""
    passed = None if status == "refused" else False
    return Row(case.strategy, case.ranks, case.optimizer, case.accumulation, status, passed, reason=reason)


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest number, None if there is none; NaN is larger than all."""
    numbers = [value for value in values if value is not None]
    return max(numbers, key=lambda value: (math.isnan(value), value), default=None)


# --- as text --------------------------------------------------------------------------------------------------------

HEAD = ("strategy", "ranks", "micro-batches", "optimizer", "loss", "norm", "gradient", "weights", "")
_ALIGNMENTS = ("<26", ">5", ">13", "<9", ">8", ">8", ">8", ">8", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `HEAD`."""
    differences = (
        row.max_loss_difference,
        row.max_norm_difference,
        row.max_gradient_difference,
        row.max_weight_difference,
    )
    return (
        row.strategy,
        str(row.ranks),
        str(row.accumulation),
        row.optimizer,
        *("-" if number is None else f"{number:.1e}" if number else "0" for number in differences),
        row.status,
    )


def line(cells: Sequence[str]) -> str:
    """Return one line of the table."""
    aligned = (f"{cell:{alignment}}" for cell, alignment in zip(cells, _ALIGNMENTS, strict=True))
    return "  ".join(aligned).rstrip()


def explanations(rows: Sequence[Row]) -> list[str]:
    """Return why rows did not pass; each reason of refused runs once, with the runs that it holds for."""
    refused = [(row.strategy, row.ranks, f"refused: {row.reason}") for row in rows if row.status == "refused"]
    others = (row for row in rows if not row.passed and row.status != "refused")
    return [*map(explanation, others), *by_reason(refused)]


def explanation(row: Row) -> str:
    """Return why a row did not pass."""
    micro_batches = f"{row.accumulation} micro-batch{'es' * (row.accumulation != 1)}"
    run = f"{row.strategy} on {counted(row.ranks, 'rank')}, {micro_batches}, {row.optimizer}"
    if row.status in ("refused", "crashed"):
        return f"{run}: {row.status}: {row.reason}"
    return f"{run}: {row.what}\n  likely: {row.reason}"
