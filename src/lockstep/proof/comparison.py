"""Run one case on one rank: the reference records what it does, every other run is compared with that record.

reference     steps.json, gradient-0, weights-1, gradient-1, ...          on disk, safetensors
run           gradient of update 0 <-> gradient-0, one parameter at a time; weights after it <-> weights-1; ...
both          model: the weights as a run publishes them; names, shapes and values are compared at the end
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_map

from lockstep.core.errors import RunFailed
from lockstep.data.order import MODULUS, digest
from lockstep.distributed.shard_boxes import is_sharded
from lockstep.models.weight_files import read_weights
from lockstep.proof.evidence import (
    Evidence,
    ParameterDeviation,
    PublishedComparison,
    StepComparison,
    TensorComparison,
    UpdateRecord,
)
from lockstep.proof.rank_dependence import design_notes, disable_dropout, measured_causes
from lockstep.proof.tolerances import EPS, NEGLIGIBLE_GRADIENT, NORMALIZING_OPTIMIZERS, Tolerance
from lockstep.training.ledger import expected_digest
from lockstep.training.publishing import publish
from lockstep.training.session import components_of, ledger_of

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.records import Batch, GlobalBatch, StepReport
    from lockstep.training.session import Session

Tamper = Callable[["Session"], None]
_STEPS, _MEASURED = "steps.json", "measured.json"
_IGNORED = -100
_SHIFTS = tuple(shift for size in range(1, 9) for shift in (size, -size))


def record_reference(session: Session, folder: Path, steps: int) -> list[str]:
    """Run the reference on one rank and record it in `folder`; return notes on what depends on ranks by design."""
    folder.mkdir(parents=True)
    disabled = disable_dropout(components_of(session).sharding.state.model)
    notes = [*([disabled] if disabled else []), *design_notes(session)]
    write_tensors(components_of(session).sharding.state.weights(), folder / _weights_file(0))
    records: list[UpdateRecord] = []
    for batch in _first_batches(session, steps):
        scale = float(components_of(session).scaler.scale)
        session.accumulate(batch)
        gradients = components_of(session).sharding.gradients()
        write_tensors(_unscaled(gradients, scale), folder / _gradient_file(batch.step))
        records.append(_gather_record(session, batch))
        _add_report(records, session.commit().result())
        write_tensors(components_of(session).sharding.state.weights(), folder / _weights_file(batch.step + 1))
    publish(session, lambda: folder)
    (folder / _STEPS).write_text(json.dumps([asdict(record) for record in records]))
    (folder / _MEASURED).write_text(json.dumps(measured_causes(session)))
    return notes


class RunComparison:
    """A run and its reference. All ranks take part; the first one compares.

    Attributes:
        evidence: Grows during the run; complete once `run` has returned.
    """

    def __init__(self, session: Session, folder: Path, steps: int, tolerance: Tolerance, optimizer: str) -> None:
        self._session = session
        self._folder = folder
        self._compares = components_of(session).world.rank == 0
        self._steps = steps
        self._tolerance = tolerance
        self._normalizes = optimizer in NORMALIZING_OPTIMIZERS
        self._weight_tolerance = tolerance.normalized_weights if self._normalizes else tolerance.weights
        self._negligible: set[str] = set()
        self._reference = [UpdateRecord(**record) for record in json.loads((folder / _STEPS).read_text())]
        self._order = _parameter_order(session)
        self._records: list[UpdateRecord] = []
        self.evidence = Evidence(TensorComparison(), [], 0.0, _tied_names(session))
        self.evidence.measured = json.loads((folder / _MEASURED).read_text())

    def run(self, tamper: Tamper | None) -> None:
        """Train and compare; whatever the session raises is raised after `evidence` has what came before."""
        session, evidence = self._session, self.evidence
        disable_dropout(components_of(session).sharding.state.model)
        evidence.notes = design_notes(session)
        evidence.initial = self._compare(self._weights(), _weights_file(0), _bitwise)
        if tamper is not None:
            tamper(session)
        for batch in _first_batches(session, min(self._steps, len(self._reference))):
            reference = self._reference[batch.step]
            scale = float(components_of(session).scaler.scale)
            session.accumulate(batch)
            slack = self._gradient_slack()
            gradient = self._compare(
                _unscaled(components_of(session).sharding.gradients(wanted=self._compares), scale),
                _gradient_file(batch.step),
                self._relative_to_norm(reference.norm, self._tolerance.gradient + slack),
            )
            self._records.append(_gather_record(session, batch))
            step = StepComparison(self._records[-1], reference, gradient, slack)
            evidence.steps.append(step)
            _add_report(self._records, session.commit().result())
            evidence.summed_rate += reference.rate if reference.kept else 0.0
            step.weights = self._compare(
                self._weights(), _weights_file(batch.step + 1), self._relative_to_rate(), _weights_file(batch.step)
            )
            step.unequal = _unequal_parameter(session)
        self._find_shift()
        evidence.published = self._compare_published()

    def _compare_published(self) -> PublishedComparison | None:
        """Publish the weights and compare the files, on the first rank. All ranks take part."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:  # the first rank's is used
            try:
                place = publish(self._session, lambda: Path(folder))
            except RunFailed as failure:
                return PublishedComparison(failure=str(failure)) if self._compares else None
            if not self._compares:
                return None
            expected = read_weights(self._folder / place.relative_to(folder))
            return compare_published(read_weights(place).tensors, expected.tensors, self._relative_to_rate())

    def _weights(self) -> NamedTensors:
        return components_of(self._session).sharding.state.weights(wanted=self._compares)

    def _compare(self, pairs: NamedTensors, name: str, measure: Measure, base: str | None = None) -> TensorComparison:
        """Compare on the first rank. All ranks take part, since the tensors are gathered one by one."""
        if not self._compares:
            for _ in pairs:
                pass
            return TensorComparison()
        return compare(pairs, self._folder / name, self._order, measure, self._folder / base if base else None)

    def _gradient_slack(self) -> float:
        """Return how much the gradient may differ because the weights do: about their share of the distance covered.

        Only a normalizing optimizer makes more of rounding than rounding.
        """
        before = self.evidence.steps[-1].weights if self.evidence.steps else None
        return min(before.worst, self._weight_tolerance) if before is not None and self._normalizes else 0.0

    def _relative_to_norm(self, global_norm: float, tolerance: float) -> Measure:
        """Measure relative to the parameter's gradient norm, or to a share of the global one if that is larger."""

        def measure(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
            deviation, norm = (run - expected).norm().item(), expected.norm().item()
            if norm <= NEGLIGIBLE_GRADIENT * global_norm:
                self._negligible.add(name)
            unit = max(norm, self._tolerance.noise * global_norm)
            difference = deviation / unit if unit else (0.0 if deviation == 0 else math.inf)
            return difference, not difference <= tolerance

        return measure

    def _relative_to_rate(self) -> Measure:
        """Measure the root mean square relative to the summed learning rate; rounding of weights is allowed, too."""
        summed_rate, updates = self.evidence.summed_rate, len(self._records)

        def measure(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
            if self._normalizes and name in self._negligible:
                return 0.0, False
            root = max(1, expected.numel()) ** 0.5
            deviation = (run - expected).norm().item() / root
            rounding = updates * EPS * expected.norm().item() / root
            return deviation / (summed_rate or 1.0), not deviation <= self._weight_tolerance * summed_rate + rounding

        return measure

    def _find_shift(self) -> None:
        """Find out whether the first wrong samples are those of a cursor that is off by a few."""
        segments = ledger_of(self._session).segments
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


# --- records ------------------------------------------------------------------------------------------------------


def _first_batches(session: Session, steps: int) -> Iterator[GlobalBatch]:
    for batch in session.batches():
        yield batch
        if batch.step + 1 >= steps:
            return


def _gather_record(session: Session, batch: GlobalBatch) -> UpdateRecord:
    """Return the record of an update that isn't committed yet. All ranks take part."""
    components = components_of(session)
    counts = [components.objective.count(_on_cpu(micro)) if micro.samples else 0 for micro in batch.micro_batches]
    own = (batch.count, batch.digest, _content(batch), counts)
    gathered = cast("list[Any]", components.world.axis.gather(own if components.position.reports_counts else None))
    ranks = [record for record in gathered if record is not None]
    return UpdateRecord(
        step=batch.step,
        count=float(sum(count for count, _, _, _ in ranks)),
        samples=session.progress.samples + batch.samples,
        digest=sum(part for _, part, _, _ in ranks) % MODULUS,
        content=_sum_contents([content for _, _, content, _ in ranks]),
        counts=[counts for _, _, _, counts in ranks],
    )


def _add_report(records: list[UpdateRecord], report: StepReport) -> None:
    record = records[report.step - 1]
    record.reported = True
    record.loss = report.loss if report.count else 0.0
    record.norm, record.rate, record.kept = report.grad_norm, report.lr, report.kept


def _on_cpu(batch: Batch) -> Batch:
    """Return the batch as `Objective.count` takes it."""
    move = lambda value: value.cpu() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return replace(batch, inputs=tree_map(move, batch.inputs), targets=tree_map(move, batch.targets))


def _content(batch: GlobalBatch) -> list[float]:
    """Return a digest of the batch's integers and the sum of its floats, whatever their order, split and padding."""
    contents = [[0.0, 0.0]]
    for micro_batch in batch.micro_batches:
        if micro_batch.samples:
            for tensor in _without_padding(micro_batch):
                if tensor.is_floating_point():
                    contents.append([0.0, tensor.detach().double().sum().item()])
                elif not tensor.is_complex():
                    contents.append([float(digest(0, tensor.detach().cpu().long().flatten().numpy())), 0.0])
    return _sum_contents(contents)


def _without_padding(batch: Batch) -> Iterator[Tensor]:
    """Yield the targets, and those inputs of which padding is known, both without padding."""
    targets = batch.targets
    if not isinstance(targets, torch.Tensor):
        return
    valid = torch.ones_like(targets, dtype=torch.bool) if targets.is_floating_point() else targets != _IGNORED
    yield targets[valid]
    for value in batch.inputs.values() if isinstance(batch.inputs, Mapping) else batch.inputs:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield value
            elif value.shape == valid.shape:
                yield value[valid]


def _sum_contents(contents: list[list[float]]) -> list[float]:
    digests, sums = zip(*contents, strict=True)
    return [float(sum(map(int, digests)) % MODULUS), math.fsum(sums)]


def _unequal_parameter(session: Session) -> str | None:
    """Return the first parameter that several ranks hold whole, with different values. All ranks take part."""
    own = {
        name: (parameter.detach().double().sum().item(), parameter.detach().double().abs().sum().item())
        for name, parameter in components_of(session).sharding.state.model.named_parameters()
        if not is_sharded(parameter)
    }
    gathered = cast("list[dict[str, Any]]", components_of(session).world.axis.gather(own))
    for name in dict.fromkeys(name for sums in gathered for name in sums):
        if len({repr(sums[name]) for sums in gathered if name in sums}) > 1:
            return name
    return None


def _parameter_order(session: Session) -> dict[str, int]:
    """Return the position of each parameter in the whole model. All ranks take part."""
    own = [name for name, _ in _named_parameters(session)]
    gathered = cast("list[Any]", components_of(session).world.axis.gather(own))
    return {name: place for place, name in enumerate(dict.fromkeys(name for names in gathered for name in names))}


def _named_parameters(session: Session) -> list[tuple[str, Any]]:
    """Return parameters under all their names, tied ones too."""
    return list(components_of(session).sharding.state.model.named_parameters(remove_duplicate=False))


def _tied_names(session: Session) -> list[list[str]]:
    """Return groups of names that share one parameter. All ranks take part."""
    names: dict[int, list[str]] = {}
    for name, parameter in _named_parameters(session):
        names.setdefault(id(parameter), []).append(name)
    own = [group for group in names.values() if len(group) > 1]
    gathered = cast("list[Any]", components_of(session).world.axis.gather(own))
    return [list(group) for group in dict.fromkeys(tuple(group) for groups in gathered for group in groups)]


def _bitwise(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
    difference = (run - expected).abs().max().item() if run.numel() else 0.0
    return difference, difference != 0.0


def _unscaled(pairs: NamedTensors, scale: float) -> NamedTensors:
    return ((name, gradient / scale if scale != 1 else gradient) for name, gradient in pairs)


def _gradient_file(step: int) -> str:
    return f"gradient-{step}.safetensors"


def _weights_file(updates: int) -> str:
    return f"weights-{updates}.safetensors"


NamedTensors = Iterable[tuple[str, "Tensor"]]
Measure = Callable[[str, "Tensor", "Tensor"], tuple[float, bool]]
"""Maps (name, run's tensor, reference's tensor), both float64, to their difference and whether that is too much."""


def write_tensors(pairs: NamedTensors, path: Path) -> None:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in pairs}, path)


def compare(
    pairs: NamedTensors, path: Path, order: Mapping[str, int], measure: Measure, base: Path | None = None
) -> TensorComparison:
    """Compare all tensors of a run with a file of the reference.

    Args:
        order: Position of each name in the model; other names are ignored.
        base: File of the values that both started from; None: zeros.
    """
    comparison = TensorComparison()
    totals = (0.0, 0.0, 0.0)
    with ExitStack() as files:
        reference = files.enter_context(cast("Any", safe_open)(path, framework="pt"))
        before = files.enter_context(cast("Any", safe_open)(base, framework="pt")) if base else None
        missing = {name for name in reference.keys() if name in order}  # noqa: SIM118
        for name, tensor in pairs:
            if name not in order:
                continue
            if name not in missing:
                comparison.extra.append(name)
                continue
            missing.discard(name)
            run, expected = tensor.double(), reference.get_tensor(name).double()
            difference, too_much = measure(name, run, expected)
            comparison.total += 1
            comparison.worst = _larger(comparison.worst, difference)
            comparison.largest = _larger(comparison.largest, (run - expected).abs().max().item() if run.numel() else 0)
            origin = before.get_tensor(name).double() if before else torch.zeros_like(expected)
            products = _products(run - origin, expected - origin)
            totals = (totals[0] + products[0], totals[1] + products[1], totals[2] + products[2])
            if too_much:
                comparison.deviating += 1
                if comparison.first is None or order[name] < order[comparison.first.name]:
                    comparison.first = ParameterDeviation(name, difference, *_fit(*products))
        comparison.missing = sorted(missing, key=order.__getitem__)
    comparison.factor, comparison.residual = _fit(*totals)
    return comparison


def compare_published(
    run: Mapping[str, Tensor], expected: Mapping[str, Tensor], measure: Measure
) -> PublishedComparison:
    """Compare names, shapes and values of two published models."""
    comparison = PublishedComparison(
        missing=[name for name in expected if name not in run], extra=[name for name in run if name not in expected]
    )
    for name, reference in expected.items():
        if name not in run:
            continue
        if run[name].shape != reference.shape:
            comparison.reshaped.append(name)
        elif measure(name, run[name].double(), reference.double())[1]:
            comparison.deviating.append(name)
    return comparison


def _larger(first: float, second: float) -> float:
    """Return the larger number; NaN is the largest of all."""
    return second if math.isnan(second) or second > first else first


def _products(run: Tensor, expected: Tensor) -> tuple[float, float, float]:
    return (run * expected).sum().item(), run.square().sum().item(), expected.square().sum().item()


def _fit(dot: float, run_square: float, reference_square: float) -> tuple[float, float]:
    """Return the factor c that brings c x reference nearest to the run, and what remains, relative to the reference."""
    if not reference_square > 0 or not math.isfinite(dot):
        return 1.0, math.inf if run_square or not math.isfinite(dot) else 0.0
    factor = dot / reference_square
    return factor, math.sqrt(max(0.0, run_square - factor * dot) / reference_square)
