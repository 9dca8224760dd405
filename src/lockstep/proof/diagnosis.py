"""Find where a run first deviates from the single process, and the likely cause.

    other samples? --> other initial weights? --> loss --> gradient --> norm --> weights after the update
    (counts, digest)                              the first deviation is reported, not what follows from it

A cause is inferred, not known: it explains everything that was recorded, and is reported as `likely`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.proof.cases import Case
from lockstep.proof.evidence import Evidence, PublishedComparison, StepComparison, TensorComparison
from lockstep.proof.tolerances import NORMALIZING_OPTIMIZERS, Tolerance

_NEAR = 0.01
"""How near a factor must be to a number, relatively, to count as it, and how much of a gradient it may leave."""

_ROUNDING = 5
"""A deviation of at most this many tolerances may be accumulated rounding."""


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


def diagnose(case: Case, evidence: Evidence, tolerance: Tolerance) -> Deviation | None:
    """Return the first deviation that is out of tolerance, or None."""
    if not evidence.initial.agrees:
        name = evidence.initial.first_name
        return Deviation(0, name, f"before step 1 {name} has other weights", _initial_weights_cause(evidence))
    for step in evidence.steps:
        deviation = _at_step(step, case, evidence, tolerance)
        if deviation is not None:
            if evidence.measured and step.same_samples:
                by_design = "".join(f"by design: {note}; " for note in evidence.notes)
                return replace(deviation, reason=by_design + "; ".join(evidence.measured))
            if evidence.notes:
                reason = f"by design: {'; '.join(evidence.notes)}. Otherwise: {deviation.reason}"
                return replace(deviation, reason=reason)
            return deviation
    steps = len(evidence.steps)
    if evidence.failure is not None:
        return Deviation(steps, None, f"the run ended after step {steps}", evidence.failure)
    if not steps:
        return Deviation(0, None, "no update was compared", "the run ended before its first update")
    if evidence.published is not None and not evidence.published.agrees:
        return _published(steps, evidence.published)
    return None


def _published(steps: int, published: PublishedComparison) -> Deviation:
    """Describe weight files that deviate although the weights in memory do not."""
    if published.failure is not None:
        return Deviation(steps, None, f"after step {steps} the weights could not be published", published.failure)
    parts = {
        "missing": published.missing,
        "unexpected": published.extra,
        "with another shape": published.reshaped,
        "with other values": published.deviating,
    }
    counts = ", ".join(f"{len(names)} {what}" for what, names in parts.items() if names)
    first = next(name for names in parts.values() for name in names)
    what = f"after step {steps} the published weights differ from the single process's: {counts}; the first is {first}"
    return Deviation(steps, first, what, "updates agree, so the error is in how weights are gathered or written")


def _at_step(step: StepComparison, case: Case, evidence: Evidence, tolerance: Tolerance) -> Deviation | None:
    run, reference, gradient, weights = step.run, step.reference, step.gradient, step.weights
    number = run.step + 1
    loss_deviates = run.reported and not step.loss_difference <= tolerance.loss
    norm_deviates = run.reported and not step.norm_difference <= tolerance.norm + step.slack
    losses = f"loss {run.loss:.7g} instead of {reference.loss:.7g}"
    and_loss = f"; {losses}" if loss_deviates else ""
    samples = _samples_deviation(step, suspicious=loss_deviates or not gradient.agrees)
    if samples:
        what, cause = f"{samples}{and_loss}", _samples_cause(step, evidence)
        return Deviation(number, gradient.first_name, f"step {number}: {what}", cause)
    if run.reported and run.kept != reference.kept:
        what = "kept, but the single process discarded it" if run.kept else "discarded, but the single process kept it"
        cause = "an overflow or a NaN on one side only: compare the loss scales"
        return Deviation(number, gradient.first_name, f"step {number}: the update was {what}", cause)
    if not gradient.agrees:
        what = f"step {number}: {_gradient_deviation(gradient)}{and_loss}"
        cause = _gradient_cause(step, case, evidence, tolerance, loss_deviates)
        return Deviation(number, gradient.first_name, what, cause)
    if loss_deviates:
        what = f"step {number}: {losses} (relative difference {step.loss_difference:.1e})"
        return Deviation(number, None, what, _loss_cause(step, case))
    if norm_deviates:
        what = f"gradient norm {run.norm:.6g} instead of {reference.norm:.6g}, although gradients agree"
        return Deviation(number, None, f"step {number}: {what}", _norm_cause(step, case))
    if step.unequal is not None:
        what = f"step {number}: after the update ranks hold different values of {step.unequal}"
        return Deviation(number, step.unequal, what, _unequal_cause(step.unequal, evidence))
    if weights is not None and not weights.agrees:
        what = f"step {number}: {_weights_deviation(weights)}"
        return Deviation(number, weights.first_name, what, _weights_cause(step, weights, case, evidence))
    return None


# --- what deviates --------------------------------------------------------------------------------------------------


def _samples_deviation(step: StepComparison, *, suspicious: bool) -> str | None:
    """Compare contents only if something else deviates: some padding can't be distinguished from content."""
    run, reference = step.run, step.reference
    if run.samples != reference.samples:
        return f"{run.samples:,} samples consumed instead of {reference.samples:,}"
    if run.digest != reference.digest:
        return "the samples differ from the single process's (by their digests)"
    if not math.isclose(run.count, reference.count, rel_tol=1e-9):  # sums of class weights are rounded
        return f"{run.count:,.10g} valid targets instead of {reference.count:,.10g}"
    if not suspicious:
        return None
    digest_differs = run.content[0] != reference.content[0]
    if digest_differs or abs(run.content[1] - reference.content[1]) > 1e-9 * max(1.0, abs(reference.content[1])):
        return "the samples' indices agree, but their contents differ"
    return None


def _gradient_deviation(gradient: TensorComparison) -> str:
    if gradient.first is None:
        return f"{gradient.first_name} has {'no' if gradient.missing else 'a'} gradient, unlike in the single process"
    first = gradient.first
    return f"the gradient of {first.name} differs by {first.difference:.1e} of its norm{_of_parameters(gradient)}"


def _weights_deviation(weights: TensorComparison) -> str:
    if weights.first is None:
        return f"only {'the single process' if weights.missing else 'the run'} has weights {weights.first_name}"
    first = weights.first
    return (
        f"loss and gradients agree, but after the update {first.name} differs by {first.difference:.1e} of the summed "
        f"learning rate{_of_parameters(weights)}"
    )


def _of_parameters(tensors: TensorComparison) -> str:
    return f" (first of {tensors.deviating} among {tensors.total} parameters)" if tensors.deviating > 1 else ""


# --- likely causes --------------------------------------------------------------------------------------------------


def _initial_weights_cause(evidence: Evidence) -> str:
    initial = evidence.initial
    if initial.missing or initial.extra:
        return "the strategy renames a parameter, or loses a tied one"
    if initial.deviating == initial.total:
        return "another initialization: other random numbers, or another seed"
    return "these parameters are not initialized by name, or were not sent to all ranks"


def _samples_cause(step: StepComparison, evidence: Evidence) -> str:
    if step.run.samples != step.reference.samples:
        return "the cursor counts differently: an update took more or fewer samples than batch.global_size"
    if step.run.digest != step.reference.digest:
        if evidence.shift is not None:
            size, direction = abs(evidence.shift), "ahead" if evidence.shift > 0 else "behind"
            return f"the cursor is off by {size}: these are the samples {size} {direction}"
        return "samples were swapped, left out or used twice: the order, or its split among ranks, differs"
    return "a sample was swapped for another when it was fetched, or the dataset returns other items each time"


def _gradient_cause(
    step: StepComparison, case: Case, evidence: Evidence, tolerance: Tolerance, loss_deviates: bool
) -> str:
    gradient, first = step.gradient, step.gradient.first
    tied = _tied_names(gradient.first_name, evidence)
    if first is None:
        name = f"{gradient.first_name} ({tied})" if tied else gradient.first_name
        return f"{name} takes no part in the reduction, or is no longer tied"
    partial = gradient.deviating < gradient.total
    if not partial and gradient.residual <= _NEAR:
        if abs(gradient.factor - 1) > 2 * gradient.residual:
            scaled = f"all gradients are {gradient.factor:.6g} times the reference's: the loss or its seed is scaled"
            return _factor_cause(gradient.factor, case) or scaled
        return (
            f"all gradients differ a little ({gradient.residual:.0e} of the whole): something is computed in a lower "
            f"precision, such as a reduction, a cast or a matrix product"
        )
    if tied and gradient.deviating == 1:
        return f"{first.name} is tied ({tied}), and not all of its uses reach its gradient: it is not synchronized"
    if first.residual <= _NEAR and partial and (cause := _factor_cause(first.factor, case)):
        return f"for some parameters only: {cause}"
    if step.run.step > 0 and first.difference <= _ROUNDING * tolerance.gradient:
        return "rounding accumulated over earlier updates: close to the tolerance, and no known fault"
    if gradient.deviating < gradient.total / 2:
        return "only these parameters are left out of a reduction, or reduced in part"
    counts = [count for rank in step.run.counts for count in rank if count]
    if len(set(counts)) > 1:
        return (
            "a mean of means: micro-batches (or ranks) have different numbers of valid targets "
            f"({min(counts):,.10g} to {max(counts):,.10g}) but equal weights; divide a loss once, by the count of the "
            "update"
        )
    if step.run.step == 0 or not loss_deviates:
        return (
            "not known: weights and samples are equal, but the gradient has another direction; a rank's part may be "
            "left out, or used twice"
        )
    return (
        "not known: the weights agreed within tolerance before this step, but loss and gradient don't; rounding may "
        "have accumulated, or the forward has state or random numbers that a repeated forward in one process didn't "
        "show"
    )


def _factor_cause(factor: float, case: Case) -> str | None:
    """Explain a constant factor of all gradients, if it follows from the numbers of ranks and micro-batches."""
    ranks, micro = case.ranks, case.accumulation
    both = f"off by ranks x micro-batches = {ranks * micro}: a loss is divided by each of them, or twice"
    causes = (
        (ranks, f"{ranks} times too large, with {ranks} ranks: a missing division by the data ranks, or a second "
         "all-reduce"),
        (1 / ranks, f"1/{ranks} of the right size, with {ranks} ranks: divided by the data ranks twice, or not summed "
         "over them"),
        (micro, f"{micro} times too large, with {micro} micro-batches: each has its own mean, or is reduced again with "
         "earlier ones"),
        (1 / micro, f"1/{micro} of the right size, with {micro} micro-batches: divided by accumulation twice"),
        (ranks * micro, both),
        (1 / (ranks * micro), both),
    )  # fmt: skip
    return next((f"all gradients are {cause}" for number, cause in causes if _is_near(factor, number)), None)


def _is_near(factor: float, number: float) -> bool:
    return math.isfinite(factor) and abs(factor - number) <= _NEAR * number and not math.isclose(number, 1)


def _loss_cause(step: StepComparison, case: Case) -> str:
    factor = step.run.loss / step.reference.loss if step.reference.loss else math.nan
    if case.ranks > 1 and (_is_near(factor, case.ranks) or _is_near(factor, 1 / case.ranks)):
        return (
            f"gradients are correct, but the reported loss is off by the number of ranks ({case.ranks}): summed or "
            "divided twice"
        )
    return "gradients are correct, and so is training; the reported loss is not that of all samples"


def _norm_cause(step: StepComparison, case: Case) -> str:
    factor = step.run.norm / step.reference.norm if step.reference.norm else math.nan
    ranks, wrong = case.ranks, "clipping uses a wrong norm"
    if _is_near(factor**2, 1 / ranks):
        return f"{wrong}: its square is 1/{ranks} of the global norm's, so each of {ranks} ranks uses only its part"
    if _is_near(factor**2, ranks):
        return f"{wrong}: its square is {ranks} times the global norm's, summed over ranks that all hold everything"
    return f"{wrong}: {factor:.6g} times the norm of these gradients; some are counted twice or left out"


def _unequal_cause(name: str, evidence: Evidence) -> str:
    tied = _tied_names(name, evidence)
    if tied:
        return f"{name} is tied ({tied}) and not synchronized: each rank updates it by a local gradient"
    return f"the gradient of {name} is not reduced on all ranks, or a rank updates by itself"


def _weights_cause(step: StepComparison, weights: TensorComparison, case: Case, evidence: Evidence) -> str:
    tied = _tied_names(weights.first_name, evidence)
    if tied and weights.deviating == 1:
        return f"{weights.first_name} is tied ({tied}) and not synchronized: one use is updated without the other"
    if weights.residual <= _NEAR and weights.deviating == weights.total:
        clipped = "" if case.optimizer in NORMALIZING_OPTIMIZERS else ", or clipped by another norm"
        return f"the whole step is {weights.factor:.6g} times the single process's: another learning rate{clipped}"
    where = "" if weights.deviating == weights.total else " of these parameters"
    if step.run.step > 0:
        return f"a stale moment: the gradient is correct, so the optimizer state{where} of earlier updates is not"
    return f"the optimizer's rule{where} differs: weight decay, the learning rate of a group, or the first moments"


def _tied_names(name: str | None, evidence: Evidence) -> str | None:
    return next((" = ".join(group) for group in evidence.tied if name in group), None)
