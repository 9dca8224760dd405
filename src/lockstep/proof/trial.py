"""One run on one rank. The reference writes down what it did; any other is held against that as it goes.

reference     steps.json, gradient-0, weights-1, gradient-1, ...          on disk, safetensors
run           gradient of update 0 <-> gradient-0, one parameter at a time; weights after it <-> weights-1; ...
both          model: the weights as a run publishes them; names, shapes and values are compared at the end
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.errors import RunFailed
from lockstep.data.fetching import FetchRequest, fetch
from lockstep.data.order import MODULUS, digest
from lockstep.models.weight_files import read_weights
from lockstep.proof.comparing import Measure, Pairs, compare, compare_published, write
from lockstep.proof.evidence import Compared, Evidence, Published, Step, UpdateRecord
from lockstep.proof.probing import measured
from lockstep.proof.randomness import without_randomness
from lockstep.proof.tolerances import EPS, INDIFFERENT, NORMALISING, Tolerance
from lockstep.strategies.registry import find_strategy
from lockstep.training.audit import expected_digest
from lockstep.training.job import publish, whole_weights
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Source
    from lockstep.core.records import Batch, GlobalBatch, StepReport
    from lockstep.training.session import Session

Tamper = Callable[["Session"], None]
_STEPS, _MEASURED = "steps.json", "measured.json"
_TRIED = 4
_IGNORED = -100
_SHIFTS = tuple(shift for size in range(1, 9) for shift in (size, -size))


def record(session: Session, folder: Path, steps: int) -> list[str]:
    """Runs the reference, on its one rank; returns what a reader of the proof must know of it."""
    folder.mkdir(parents=True)
    notes = prepare(session)
    write(components_of(session).sharding.state.weights(), folder / _weights(0))
    seen: list[UpdateRecord] = []
    for step, batch in _updates(session, steps):
        scale = float(session.gradient_unit)
        session.accumulate(batch)
        write(_unscaled(components_of(session).sharding.gradients(), scale), folder / _gradient(step))
        seen.append(_seen(session, batch))
        _see(seen, session.commit().result())
        write(components_of(session).sharding.state.weights(), folder / _weights(step + 1))
    publish(session, whole_weights(session), folder)
    (folder / _STEPS).write_text(json.dumps([asdict(one) for one in seen]))
    (folder / _MEASURED).write_text(json.dumps(measured(session)))
    return notes


def prepare(session: Session) -> list[str]:
    """Takes out what is drawn in forwards, and says what else makes a run depend on ranks by design."""
    components = components_of(session)
    silenced = without_randomness(components.sharding.state.model)
    notes = [silenced] if silenced else []
    return notes + by_design(session)


def by_design(session: Session) -> list[str]:
    """Why this run may depend on micro size and number of ranks, if anything."""
    components = components_of(session)
    notes = []
    coupled = components.coupled
    if coupled is not None or not components.objective.decomposes:
        reason = coupled or "the objective says that it does not decompose over samples"
        notes.append(f"{reason}: the loss depends on batch.micro_size and on the number of ranks")
    if components.source.draws and _draws(components.source):
        notes.append("the data are drawn at random for each rank and micro-batch, so that samples differ between ranks")
    strategy = find_strategy(components.plan.strategy)
    if (loss := strategy.lossy(strategy.options_of(components.config.parallel))) is not None:
        notes.append(loss)
    return notes


def _draws(source: Source) -> bool:
    """Whether samples differ where only the random numbers do; a source that may draw need not."""
    some = np.arange(min(_TRIED, source.facts.samples))
    one, other = (fetch(source, FetchRequest(some, False, 0, seed)) for seed in (1, 2))
    return not _equal((one.inputs, one.targets), (other.inputs, other.targets))


def _equal(one: object, other: object) -> bool:
    mine, theirs = tree_leaves(one), tree_leaves(other)
    if len(mine) != len(theirs):
        return False
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
        for a, b in zip(mine, theirs, strict=True)
    )


class RunComparison:
    """A run beside its reference: made on every rank, of use on the first.

    Attributes:
        evidence: grows as the run goes on; complete only once `run` has returned.
    """

    def __init__(self, session: Session, folder: Path, steps: int, tolerance: Tolerance, optimizer: str) -> None:
        self._session = session
        self._folder = folder
        self._first = components_of(session).world.rank == 0
        self._steps = steps
        self._tolerance = tolerance
        self._allowed = tolerance.of_weights(optimizer)
        self._normalises = optimizer in NORMALISING
        self._indifferent: set[str] = set()
        self._reference = [UpdateRecord(**one) for one in json.loads((folder / _STEPS).read_text())]
        self._order = _order(session)
        self._seen: list[UpdateRecord] = []
        self.evidence = Evidence(Compared(), [], 0.0, _tied(session))
        self.evidence.measured = json.loads((folder / _MEASURED).read_text())

    def run(self, tamper: Tamper | None) -> None:
        """Raises what the session raises; what was seen until then is in `evidence`."""
        session = self._session
        prepare(session)
        self.evidence.notes = by_design(session)
        self.evidence.begins = self._compare(self._weights(), _weights(0), _is_another)
        if tamper is not None:
            tamper(session)
        for number, batch in _updates(session, min(self._steps, len(self._reference))):
            reference = self._reference[number]
            scale = float(session.gradient_unit)
            session.accumulate(batch)
            drift = self._drift()
            gradient = self._compare(
                _unscaled(components_of(session).sharding.gradients(wanted=self._first), scale),
                _gradient(number),
                self._by_norm(reference.norm, self._tolerance.gradient + drift),
            )
            self._seen.append(_seen(session, batch))
            step = Step(self._seen[-1], reference, gradient, drift)
            self.evidence.steps.append(step)
            _see(self._seen, session.commit().result())
            self.evidence.summed_rate += reference.rate if reference.kept else 0.0
            measure = self._in_rates(self.evidence.summed_rate, number + 1)
            step.weights = self._compare(self._weights(), _weights(number + 1), measure, _weights(number))
            step.apart = _apart(session)
        self._look_for_shift()
        self.evidence.published = self._published()

    def _published(self) -> Published | None:
        """What the run would leave beside what the reference has left; on the first rank. All ranks together."""
        weights = whole_weights(self._session)
        if not self._first:
            return None
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            try:
                place = publish(self._session, weights, Path(folder))
            except RunFailed as failure:
                return Published(said=str(failure))
            expected = read_weights(self._folder / place.relative_to(folder))
            measure = self._in_rates(self.evidence.summed_rate, len(self._seen))
            return compare_published(read_weights(place).tensors, expected.tensors, measure)

    def _weights(self) -> Pairs:
        return components_of(self._session).sharding.state.weights(wanted=self._first)

    def _compare(self, pairs: Pairs, name: str, measure: Measure, base: str | None = None) -> Compared:
        """All ranks together; the first alone has something to compare."""
        if not self._first:
            for _ in pairs:
                pass
            return Compared()
        return compare(pairs, self._folder / name, self._order, measure, self._folder / base if base else None)

    def _drift(self) -> float:
        """By how much the weights that a gradient is taken at may be off: a difference of a share of the way gone
        changes a gradient by about that share of it. Only rules that normalise make more of it than rounding."""
        before = self.evidence.steps[-1].weights if self.evidence.steps else None
        return min(before.worst, self._allowed) if before is not None and self._normalises else 0.0

    def _by_norm(self, whole: float, tolerance: float) -> Measure:
        """In units of the gradient's norm, or of a share of the whole one's."""

        def measure(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
            off, size = (run - expected).norm().item(), expected.norm().item()
            if size <= INDIFFERENT * whole:
                self._indifferent.add(name)
            unit = max(size, self._tolerance.noise * whole)
            difference = off / unit if unit else (0.0 if off == 0 else math.inf)
            return difference, not difference <= tolerance

        return measure

    def _in_rates(self, summed_rate: float, updates: int) -> Measure:
        """In units of the summed learning rate, root mean square; beyond what rounding the weights explains."""

        def measure(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
            if self._normalises and name in self._indifferent:
                return 0.0, False
            size = max(1, expected.numel()) ** 0.5
            off = (run - expected).norm().item() / size
            rounding = updates * EPS * expected.norm().item() / size
            return off / (summed_rate or 1.0), not off <= self._allowed * summed_rate + rounding

        return measure

    def _look_for_shift(self) -> None:
        """Whether samples that are wrong are those of a cursor that is off."""
        segments = self._session.segments
        order = segments[-1].order if segments else None
        for step in self.evidence.steps:
            if order is None or step.run.digest == step.reference.digest:
                continue
            last = step.reference.samples
            first = self.evidence.steps[step.run.step - 1].reference.samples if step.run.step else 0
            for shift in _SHIFTS:
                if first + shift >= 0 and expected_digest(order, first + shift, last + shift) == step.run.digest:
                    self.evidence.shift = shift
            return


# --- what is seen -------------------------------------------------------------------------------------------------


def _updates(session: Session, steps: int) -> Iterator[tuple[int, GlobalBatch]]:
    for batch in session.batches():
        yield batch.step, batch
        if batch.step + 1 >= steps:
            return


def _seen(session: Session, batch: GlobalBatch) -> UpdateRecord:
    """All ranks together; before the update is committed."""
    mine = (batch.count, batch.digest, _content(batch), [_count(session, one) for one in batch.micro_batches])
    told = mine if components_of(session).place.reports_counts else None
    everywhere = [one for one in cast("list[Any]", components_of(session).world.axis.gather(told)) if one is not None]
    return UpdateRecord(
        step=batch.step,
        count=float(sum(count for count, _, _, _ in everywhere)),
        samples=session.progress.samples + batch.samples,
        digest=sum(one for _, one, _, _ in everywhere) % MODULUS,
        content=_summed([content for _, _, content, _ in everywhere]),
        counts=[counts for _, _, _, counts in everywhere],
    )


def _see(seen: list[UpdateRecord], report: StepReport) -> None:
    one = seen[report.step - 1]
    one.reported = True
    one.loss, one.norm, one.rate, one.kept = report.loss, report.grad_norm, report.lr, report.kept


def _count(session: Session, batch: Batch) -> float:
    return components_of(session).objective.count(_on_cpu(batch)) if batch.samples else 0


def _on_cpu(batch: Batch) -> Batch:
    """For `Objective.count`."""
    move = lambda value: value.cpu() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return replace(batch, inputs=tree_map(move, batch.inputs), targets=tree_map(move, batch.targets))


def _content(batch: GlobalBatch) -> list[float]:
    """Of targets and inputs, whatever their order, split and padding: a digest of the whole numbers that are no
    padding, and a sum of the others."""
    found = [[0.0, 0.0]]
    for micro_batch in batch.micro_batches:
        if micro_batch.samples:
            found += [[_digest(tensor), _sum(tensor)] for tensor in _told(micro_batch)]
    return _summed(found)


def _told(batch: Batch) -> Iterator[Tensor]:
    """Targets, and those inputs of which padding can be told from content."""
    targets = batch.targets
    if not isinstance(targets, torch.Tensor):
        return
    whole = not targets.is_floating_point()
    valid = targets != _IGNORED if whole else torch.ones_like(targets, dtype=torch.bool)
    yield targets[valid]
    values = batch.inputs.values() if isinstance(batch.inputs, Mapping) else batch.inputs
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield value
            elif value.shape == valid.shape:
                yield value[valid]


def _digest(tensor: Tensor) -> float:
    if tensor.is_floating_point() or tensor.is_complex():
        return 0.0
    return float(digest(0, tensor.detach().cpu().long().flatten().numpy()))


def _sum(tensor: Tensor) -> float:
    return tensor.detach().double().sum().item() if tensor.is_floating_point() else 0.0


def _summed(parts: list[list[float]]) -> list[float]:
    return [float(sum(int(one[0]) for one in parts) % MODULUS), math.fsum(one[1] for one in parts)]


def _apart(session: Session) -> str | None:
    """The first parameter that ranks hold whole, and differently. All ranks together."""
    mine = {
        name: (parameter.detach().double().sum().item(), parameter.detach().double().abs().sum().item())
        for name, parameter in components_of(session).sharding.state.model.named_parameters()
        if not hasattr(parameter, "full_tensor")
    }
    everywhere = cast("list[dict[str, Any]]", components_of(session).world.axis.gather(mine))
    for name in dict.fromkeys(name for of_rank in everywhere for name in of_rank):
        if len({repr(of_rank[name]) for of_rank in everywhere if name in of_rank}) > 1:
            return name
    return None


def _order(session: Session) -> dict[str, int]:
    """The place of each parameter of the whole model. All ranks together."""
    everywhere = cast("list[Any]", components_of(session).world.axis.gather([name for name, _ in _named(session)]))
    return {name: place for place, name in enumerate(dict.fromkeys(name for names in everywhere for name in names))}


def _named(session: Session) -> list[tuple[str, Any]]:
    """Under all names, tied ones too."""
    return list(components_of(session).sharding.state.model.named_parameters(remove_duplicate=False))


def _tied(session: Session) -> list[list[str]]:
    """Names of one parameter each. All ranks together."""
    names: dict[int, list[str]] = {}
    for name, parameter in _named(session):
        names.setdefault(id(parameter), []).append(name)
    mine = [group for group in names.values() if len(group) > 1]
    everywhere = cast("list[Any]", components_of(session).world.axis.gather(mine))
    return [list(group) for group in dict.fromkeys(tuple(group) for of_rank in everywhere for group in of_rank)]


# --- measures -----------------------------------------------------------------------------------------------------


def _is_another(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
    """First weights are the same to the bit."""
    difference = (run - expected).abs().max().item() if run.numel() else 0.0
    return difference, difference != 0.0


def _unscaled(pairs: Pairs, scale: float) -> Pairs:
    return ((name, gradient / scale if scale != 1 else gradient) for name, gradient in pairs)


def _gradient(step: int) -> str:
    return f"gradient-{step}.safetensors"


def _weights(updates: int) -> str:
    return f"weights-{updates}.safetensors"
