"""What a proof tells of each run: a row, as text and as JSON.

strategy  ranks  micro-batches  optimizer      loss     norm  gradient   weights
ddp           2              1  adamw       5.1e-08  1.2e-07   3.0e-07   2.1e-04  passed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.proof.cases import Case
from lockstep.proof.evidence import Evidence
from lockstep.proof.measures import loss_difference, norm_difference
from lockstep.proof.reasons import Discrepancy, finding
from lockstep.proof.tolerances import Tolerance

Status = Literal["passed", "failed", "refused", "crashed"]


@dataclass(frozen=True, slots=True)
class Row:
    """One run beside the single process. Differences are the largest of all its steps; None where nothing ran.

    Attributes:
        accumulation: micro-batches a rank.
        steps: that were compared.
        max_loss_difference, max_norm_difference: relative.
        max_gradient_difference: of a parameter, in units of its gradient's norm.
        max_weight_difference: after the last step, of a parameter, in units of the summed learning rate; root mean
            square over its elements.
        max_element_difference: the same of a single element.
        passed: None: refused.
        step: the first that differs, from 1; 0: the weights that the run began with.
        parameter: the first that differs at this step, in the model's order, if one does.
        what: differs, in a sentence.
        reason: likely; or why it was refused, or how it crashed.
        seconds: that it took.
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
        """Plain values; what isn't finite, which JSON has no number for, as text."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def row_of(case: Case, evidence: Evidence, tolerance: Tolerance, seconds: float) -> Row:
    """Of a run that was compared, to its end or as far as it came."""
    found = finding(case, evidence, tolerance)
    steps = evidence.steps
    last = next((step.weights for step in reversed(steps) if step.weights is not None), None)
    rate = evidence.summed_rate or 1.0
    return Row(
        strategy=case.strategy,
        ranks=case.ranks,
        optimizer=case.optimizer,
        accumulation=case.accumulation,
        status="passed" if found is None else "failed",
        passed=found is None,
        steps=len(steps),
        max_loss_difference=_most(loss_difference(step) for step in steps if step.run.reported),
        max_norm_difference=_most(norm_difference(step) for step in steps if step.run.reported),
        max_gradient_difference=_most(step.gradient.worst for step in steps),
        max_weight_difference=None if last is None else last.worst,
        max_element_difference=None if last is None else last.largest / rate,
        seconds=seconds,
        **_told(found),
    )


def not_run(case: Case, status: Literal["refused", "crashed"], reason: str) -> Row:
    """Of a run that there was none of."""
    passed = None if status == "refused" else False
    return Row(case.strategy, case.ranks, case.optimizer, case.accumulation, status, passed, reason=reason)


def _told(found: Discrepancy | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {"step": found.step, "parameter": found.parameter, "what": found.what, "reason": found.reason}


def _most(values: Any) -> float | None:
    found = list(values)
    if not found:
        return None
    return math.nan if any(math.isnan(value) for value in found) else max(found)


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- as text --------------------------------------------------------------------------------------------------------

HEAD = ("strategy", "ranks", "micro-batches", "optimizer", "loss", "norm", "gradient", "weights", "")
_WIDTHS = (26, 5, 13, 9, 8, 8, 8, 8)


def line(row: Row) -> str:
    """One row of the table."""
    return _aligned(cells(row))


def head() -> str:
    return _aligned(HEAD)


def cells(row: Row) -> tuple[str, ...]:
    numbers = (
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
        *("-" if number is None else f"{number:.1e}" if number else "0" for number in numbers),
        row.status,
    )


def story(row: Row) -> str:
    """A row that did not pass, in words."""
    head = f"{row.strategy} on {row.ranks} rank{'s' * (row.ranks > 1)}, {_micro(row.accumulation)}, {row.optimizer}"
    if row.status in ("refused", "crashed"):
        return f"{head}: {row.status}: {row.reason}"
    return f"{head}: {row.what}\n  likely: {row.reason}"


def _micro(number: int) -> str:
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"


def _aligned(words: Sequence[str]) -> str:
    first, *others = words
    aligned = [f"{first:<{_WIDTHS[0]}}"]
    for place, word in enumerate(others[:-1], 1):
        aligned.append(f"{word:<{_WIDTHS[place]}}" if place == 3 else f"{word:>{_WIDTHS[place]}}")
    return "  ".join([*aligned, others[-1]]).rstrip()
