"""Finds where a run first deviates from the single process.

    initial weights --> samples --> kept? --> gradient --> loss --> norm --> replicas --> weights --> published weights

The first deviation is reported, not what follows from it. Its cause is inferred, and reported as `likely`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.proof.evidence import Evidence, StepComparison, TensorComparison
from lockstep.proof.tolerances import Tolerance

_NEAR = 0.01
"""The rest that a factor may leave of all gradients, relatively, to count as their difference."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """The first deviation of a run.

    Attributes:
        step: From 1; 0: before the first.
        parameter: The first parameter that deviates, if one does.
        what: The fact, in a sentence.
        reason: The likely cause.
    """

    step: int
    parameter: str | None
    what: str
    reason: str


def diagnose(evidence: Evidence, tolerance: Tolerance) -> Deviation | None:
    """Return the first deviation that is out of tolerance, or None."""
    if not evidence.initial.agrees:
        name = evidence.initial.first_name
        reason = "these parameters are named, tied or initialized in another way, or not sent to all ranks"
        return Deviation(0, name, f"before step 1 {name} has other weights", reason)
    for step in evidence.steps:
        if (deviation := _at_step(step, tolerance)) is not None:
            by_design = "".join(f"by design: {note}; " for note in evidence.notes)
            measured = evidence.measured if step.same_samples else []
            return replace(deviation, reason=by_design + ("; ".join(measured) or deviation.reason))
    steps = len(evidence.steps)
    if evidence.failure is not None:
        return Deviation(steps, None, f"the run failed after step {steps}", evidence.failure)
    if not steps:
        return Deviation(0, None, "no update was compared", "the run ended before its first update")
    for name, difference in evidence.published.items():
        what = f"after step {steps} {len(evidence.published)} published weights differ; the first, {name}, {difference}"
        return Deviation(steps, name, what, "updates agree, so the error is in how weights are gathered or written")
    return None


def _at_step(step: StepComparison, tolerance: Tolerance) -> Deviation | None:
    run, reference, gradient, weights = step.run, step.reference, step.gradient, step.weights
    loss_deviates = run.reported and not step.loss_difference <= tolerance.loss
    losses = f"the loss is {run.loss:.7g} instead of {reference.loss:.7g}"

    def found(name: str | None, what: str, reason: str) -> Deviation:
        and_loss = f"; {losses}" if loss_deviates and what != losses else ""
        return Deviation(run.step + 1, name, f"step {run.step + 1}: {what}{and_loss}", reason)

    if not step.same_samples:
        what = f"{run.samples:,} samples were consumed instead of {reference.samples:,}, or others"
        return found(gradient.first_name, what, "the order of samples, or its split among ranks, differs")
    if not math.isclose(run.count, reference.count, rel_tol=1e-9):  # sums of class weights are rounded
        what = f"{run.count:,.10g} valid targets instead of {reference.count:,.10g}"
        return found(gradient.first_name, what, "the dataset or the collate function returns other items")
    if run.reported and run.kept != reference.kept:
        what = f"the update was {'kept' if run.kept else 'discarded'}, unlike in the single process"
        return found(gradient.first_name, what, "an overflow or a NaN on one side only: compare the loss scales")
    if not gradient.agrees:
        return found(gradient.first_name, _of_first("the gradient", gradient, "its norm"), _gradient_cause(gradient))
    if loss_deviates:
        return found(None, losses, "gradients are right, so training is; the reported loss is not of all samples")
    if run.reported and not step.norm_difference <= tolerance.norm + step.slack:
        what = f"the gradient norm is {run.norm:.6g} instead of {reference.norm:.6g}, although gradients agree"
        return found(None, what, "clipping uses a norm that counts parts of the gradient twice, or leaves them out")
    if step.unequal is not None:
        what = f"after the update ranks hold different values of {step.unequal}"
        return found(step.unequal, what, "its gradient is not reduced on all ranks, or a rank updates by itself")
    if weights is not None and not weights.agrees:
        what = _of_first("loss and gradients agree, but the weight", weights, "the summed learning rate")
        reason = "the optimizer's state, its learning rate, its weight decay or clipping differs"
        return found(weights.first_name, what, reason)
    return None


def _of_first(subject: str, tensors: TensorComparison, unit: str) -> str:
    if tensors.first is None:
        return f"{subject} of {tensors.first_name} is {'missing' if tensors.missing else 'unexpected'}"
    others = f"{tensors.deviating} of {tensors.total} parameters deviate"
    return f"{subject} of {tensors.first} differs by {tensors.first_difference:.1e} of {unit} ({others})"


def _gradient_cause(gradient: TensorComparison) -> str:
    if gradient.deviating < gradient.total:
        return "these parameters are left out of a reduction, reduced in part, or no longer tied"
    if gradient.residual > _NEAR:
        return (
            "the gradient has another direction: other samples, micro-batches with unequal numbers of targets that "
            "count equally (a mean of means), or a forward with state or random numbers"
        )
    if abs(gradient.factor - 1) <= 2 * gradient.residual:
        return "something is computed in a lower precision, such as a reduction, a cast or a matrix product"
    return (
        f"all gradients are {gradient.factor:.6g} times the single process's: a loss or gradient is summed or divided "
        "by the ranks or the micro-batches once too often"
    )
