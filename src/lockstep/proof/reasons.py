"""Where a run first differs from the single process, and what that is likely to come from.

    other samples? --> other first weights? --> loss --> gradient --> norm --> weights after the update
    (counts, digest)                            what is wrong first is told; what follows from it isn't

A reason is inferred, not known: it names what explains all that was seen, and says `likely`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.proof.cases import Case
from lockstep.proof.evidence import Compared, Evidence, Published, Step
from lockstep.proof.measures import loss_difference, norm_difference
from lockstep.proof.tolerances import NORMALISING, Tolerance

_NEAR = 0.01
"""A factor is taken for a whole number's if it is so near, and what it leaves of a gradient is no more."""

_DRIFT = 5
"""So many times a tolerance is near it."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Attributes:
    step: from 1; 0: before the first.
    parameter: the first one, if it is one.
    """

    step: int
    parameter: str | None
    what: str
    reason: str


def finding(case: Case, evidence: Evidence, tolerance: Tolerance) -> Discrepancy | None:
    """The first difference that is out of tolerance; None: there is none."""
    if not evidence.begins.agrees:
        name = evidence.begins.named
        return Discrepancy(0, name, f"before step 1 {name} has other weights", _other_start(evidence))
    for step in evidence.steps:
        found = _at(step, case, evidence, tolerance)
        if found is not None:
            if evidence.measured and not _has_other_samples(step):
                by_design = "".join(f"by design: {note}; " for note in evidence.notes)
                return _replaced(found, by_design + "; ".join(evidence.measured))
            by_design = "; ".join(evidence.notes)
            return found if not by_design else _replaced(found, f"by design: {by_design}. Else: {found.reason}")
    if evidence.said is None and not evidence.steps:
        return Discrepancy(0, None, "no update was compared", "the run was over before its first")
    if evidence.said is not None:
        return Discrepancy(len(evidence.steps), None, f"it ended after step {len(evidence.steps)}", evidence.said)
    if evidence.published is not None and not evidence.published.agrees:
        return _published(len(evidence.steps), evidence.published)
    return None


def _published(steps: int, published: Published) -> Discrepancy:
    """Of weights that aren't the reference's in the file, though they were in memory."""
    if published.said is not None:
        return Discrepancy(steps, None, f"after step {steps} the weights could not be published", published.said)
    parts = {
        "missing": published.missing,
        "left over": published.extra,
        "of another shape": published.reshaped,
        "of other values": published.off,
    }
    counts = ", ".join(f"{len(names)} {what}" for what, names in parts.items() if names)
    first = next(name for names in parts.values() for name in names)
    what = f"after step {steps} the published weights are not the single process's: {counts}; the first is {first}"
    return Discrepancy(steps, first, what, "updates agree, so the error is in how weights are gathered or written")


def _has_other_samples(step: Step) -> bool:
    return step.run.samples != step.reference.samples or step.run.digest != step.reference.digest


def _replaced(found: Discrepancy, reason: str) -> Discrepancy:
    return Discrepancy(found.step, found.parameter, found.what, reason)


def _at(step: Step, case: Case, evidence: Evidence, tolerance: Tolerance) -> Discrepancy | None:
    number, gradient, weights = step.run.step + 1, step.gradient, step.weights
    loss, norm = loss_difference(step), norm_difference(step)
    loss_off = step.run.reported and not loss <= tolerance.loss
    norm_off = step.run.reported and not norm <= tolerance.norm + step.drift
    unlike = _samples_differ(step, suspicious=loss_off or not gradient.agrees)
    if unlike:
        reason = _other_samples(step, evidence)
        return Discrepancy(number, gradient.named, f"step {number}: {unlike}{_and_loss(step, loss_off)}", reason)
    if step.run.reported and step.run.kept != step.reference.kept:
        verb = "kept" if step.run.kept else "discarded"
        what = f"step {number}: the update was {verb}, and by the single process it wasn't"
        return Discrepancy(
            number, gradient.named, what, "an overflow or a NaN on one side alone: compare the loss scales"
        )
    if not gradient.agrees:
        what = f"step {number}: {_gradients_off(gradient)}{_and_loss(step, loss_off)}"
        return Discrepancy(number, gradient.named, what, _gradient_reason(step, case, evidence, tolerance, loss_off))
    if loss_off:
        what = f"step {number}: loss {step.run.loss:.7g}, not {step.reference.loss:.7g} ({loss:.1e} relative)"
        return Discrepancy(number, None, what, _loss_reason(step, case))
    if norm_off:
        what = f"step {number}: gradient norm {step.run.norm:.6g}, not {step.reference.norm:.6g}, of equal gradients"
        return Discrepancy(number, None, what, _norm_reason(step, case))
    if step.apart is not None:
        what = f"step {number}: after the update ranks hold different values of {step.apart}"
        return Discrepancy(number, step.apart, what, _apart_reason(step.apart, evidence))
    if weights is not None and not weights.agrees:
        return Discrepancy(number, weights.named, _weights_off(number, weights), _weights_reason(step, case, evidence))
    return None


# --- what differs ---------------------------------------------------------------------------------------------------


def _samples_differ(step: Step, *, suspicious: bool) -> str | None:
    """Contents count only where something else is wrong: what pads a batch may look like content."""
    run, reference = step.run, step.reference
    if run.samples != reference.samples:
        return f"{run.samples:,} samples consumed, not {reference.samples:,}"
    if run.digest != reference.digest:
        return "other samples than the single process had (their digests differ)"
    if not math.isclose(run.count, reference.count, rel_tol=1e-9):  # sums of class weights are rounded
        return f"{run.count:,.10g} valid targets, not {reference.count:,.10g}"
    if not suspicious:
        return None
    digest_differs = run.content[0] != reference.content[0]
    if digest_differs or abs(run.content[1] - reference.content[1]) > 1e-9 * max(1.0, abs(reference.content[1])):
        return "the samples' numbers are right, and their contents are not"
    return None


def _gradients_off(gradient: Compared) -> str:
    if gradient.first is None:
        side = "has no" if gradient.missing else "has a"
        return f"{gradient.named} {side} gradient, unlike in the single process"
    first = gradient.first
    of = f", the first of {gradient.off} in {gradient.number} parameters" if gradient.off > 1 else ""
    return f"the gradient of {first.name} is off by {first.difference:.1e} of its norm{of}"


def _weights_off(number: int, weights: Compared) -> str:
    if weights.first is None:
        return f"step {number}: {weights.named} is not among the weights of both"
    first = weights.first
    of = f", the first of {weights.off} in {weights.number} parameters" if weights.off > 1 else ""
    return (
        f"step {number}: loss and gradients agree, and after the update {first.name} is off by {first.difference:.1e} "
        f"of the summed learning rate{of}"
    )


def _and_loss(step: Step, loss_off: bool) -> str:
    if not loss_off:
        return ""
    return f"; the loss is {step.run.loss:.7g}, not {step.reference.loss:.7g}"


# --- what it is likely to come from ---------------------------------------------------------------------------------


def _other_start(evidence: Evidence) -> str:
    begins = evidence.begins
    if begins.missing or begins.extra:
        return "the strategy gives a parameter another name, or loses a tied one"
    many = begins.off == begins.number
    return (
        "another initialisation: other draws, or another seed"
        if many
        else "these parameters are initialised otherwise than by name, or were not sent to all ranks"
    )


def _other_samples(step: Step, evidence: Evidence) -> str:
    if step.run.samples != step.reference.samples:
        return "the cursor counts otherwise: an update took more or fewer samples than batch.global_size"
    if step.run.digest != step.reference.digest:
        if evidence.shift is not None:
            way = "ahead" if evidence.shift > 0 else "behind"
            return f"the cursor is off by {abs(evidence.shift)}: these are the samples {abs(evidence.shift)} {way}"
        return "samples were swapped, left out or used twice: the order, or how ranks cut it, differs"
    return "a sample was swapped for another when it was fetched, or the data set gives other items each time"


def _gradient_reason(step: Step, case: Case, evidence: Evidence, tolerance: Tolerance, loss_off: bool) -> str:
    gradient = step.gradient
    first = gradient.first
    tied = _tied_name(gradient.named, evidence)
    if first is None:
        who = f"{gradient.named} ({tied})" if tied else gradient.named
        return f"{who} takes no part in the reduction, or has become a parameter of its own"
    if gradient.off == gradient.number and gradient.rest <= _NEAR:
        if abs(gradient.factor - 1) > 2 * gradient.rest:
            said = _factor(gradient.factor, case)
            return (
                said
                or f"all gradients are {gradient.factor:.6g} times theirs: the loss or its seed is scaled otherwise"
            )
        return (
            f"all gradients are off by a little ({gradient.rest:.0e} of the whole): something on the way is in a lower "
            f"precision, such as a reduction, a cast or a matrix product"
        )
    if tied and gradient.off == 1:
        return f"{first.name} is tied ({tied}), and not all of its uses reach its gradient: it is not synchronised"
    if first.rest <= _NEAR and gradient.off < gradient.number and (said := _factor(first.factor, case)):
        return f"of some parameters alone: {said}"
    if step.run.step > 0 and first.difference <= _DRIFT * tolerance.gradient:
        return "rounding that has grown with the updates before: near the tolerance, and no fault that is known"
    if gradient.off < gradient.number / 2:
        return "these parameters alone are left out of a reduction, or reduced in part"
    if step.run.step == 0 or not loss_off or _uneven(step):
        if _uneven(step):
            return (
                "a mean of means: micro-batches (or ranks) have different numbers of valid targets "
                f"({_spread(step)}) and are weighed alike; a loss is to be divided once, by the count of the update"
            )
        return (
            "not known: weights and samples are the same, and the gradient is off in direction; a rank's share may be "
            "left out, or used twice"
        )
    return (
        "not known: the weights agreed within tolerance before this step, and loss and gradient don't; they may have "
        "drifted apart, or the forward keeps or draws something that a second forward in one process didn't show"
    )


def _factor(factor: float, case: Case) -> str | None:
    """What a constant factor says."""
    ranks, micro = case.ranks, case.accumulation
    if _is(factor, ranks):
        return (
            f"all gradients are {ranks} times too large, and there are {ranks} ranks: a missing division by the data "
            f"ranks, or a second all-reduce"
        )
    if _is(factor, 1 / ranks):
        return (
            f"all gradients are 1/{ranks} of what they should be, and there are {ranks} ranks: divided by the data "
            f"ranks twice, or not summed over them"
        )
    if _is(factor, micro):
        return (
            f"all gradients are {micro} times too large, and there are {micro} micro-batches: each has a mean of its "
            f"own, or is reduced again with those before it"
        )
    if _is(factor, 1 / micro):
        return (
            f"all gradients are 1/{micro} of what they should be, and there are {micro} micro-batches: divided by "
            f"accumulation twice"
        )
    both = ranks * micro
    if _is(factor, both) or _is(factor, 1 / both):
        return f"all gradients are off by ranks x micro-batches = {both}: a loss divided for each of them, or twice"
    return None


def _is(factor: float, number: float) -> bool:
    return math.isfinite(factor) and abs(factor - number) <= _NEAR * number and not math.isclose(number, 1)


def _loss_reason(step: Step, case: Case) -> str:
    factor = step.run.loss / step.reference.loss if step.reference.loss else math.nan
    if case.ranks > 1 and (_is(factor, case.ranks) or _is(factor, 1 / case.ranks)):
        return (
            f"the gradients are right, the report is off by the number of ranks ({case.ranks}): summed or divided twice"
        )
    return "the gradients are right, so the training is; the reported loss is not that of all samples"


def _norm_reason(step: Step, case: Case) -> str:
    factor = step.run.norm / step.reference.norm if step.reference.norm else math.nan
    ranks, wrong = case.ranks, "clipping goes by a wrong norm"
    if _is(factor**2, 1 / ranks):
        return f"{wrong}: its square is 1/{ranks} of the whole gradient's, so each of {ranks} ranks has its own share"
    if _is(factor**2, ranks):
        return f"{wrong}: its square is {ranks} times the whole gradient's, summed over ranks that all hold the whole"
    return f"{wrong}: it is {factor:.6g} times that of the same gradients, some counted twice or left out"


def _apart_reason(name: str, evidence: Evidence) -> str:
    tied = _tied_name(name, evidence)
    if tied:
        return f"{name} is tied ({tied}) and not synchronised: each rank updates it by a gradient of its own"
    return f"the gradient of {name} is not reduced on all ranks, or a rank updates on its own"


def _weights_reason(step: Step, case: Case, evidence: Evidence) -> str:
    weights = step.weights
    assert weights is not None
    tied = _tied_name(weights.named, evidence)
    if tied and weights.off == 1:
        return f"{weights.named} is tied ({tied}) and not synchronised: one of its uses is updated without the other"
    where = "" if weights.off == weights.number else " of these parameters"
    if weights.rest <= _NEAR and weights.off == weights.number:
        said = f"the whole step is {weights.factor:.6g} times the single process's"
        if case.optimizer not in NORMALISING:
            return f"{said}: another learning rate, or clipped by another norm"
        return f"{said}: another learning rate"
    if step.run.step > 0:
        return f"a stale moment: the gradient is right, so what the optimizer{where} remembers of earlier ones is not"
    return f"the optimizer's rule{where} differs: weight decay, the learning rate of a group, or the first moments"


def _tied_name(name: str | None, evidence: Evidence) -> str | None:
    for group in evidence.tied:
        if name in group:
            return " = ".join(group)
    return None


def _uneven(step: Step) -> bool:
    return len(set(_flat(step.run.counts))) > 1


def _spread(step: Step) -> str:
    counts = _flat(step.run.counts)
    return f"{min(counts):,.10g} to {max(counts):,.10g}"


def _flat(counts: Iterable[list[float]]) -> list[float]:
    return [count for one in counts for count in one if count]
