"""Runs one case on one rank: the reference is recorded, and every other run compared with that record.

reference     steps.json, gradient-0, weights-1, gradient-1, ...          on disk, safetensors
run           gradient of update 0 <-> gradient-0, one parameter at a time; weights after it <-> weights-1; ...
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import safe_open
from safetensors.torch import save_file

from lockstep.core.errors import RunFailed
from lockstep.data.order import MODULUS
from lockstep.distributed.shard_boxes import is_sharded
from lockstep.loop.session import components_of
from lockstep.models.weight_files import read_weights
from lockstep.proof.evidence import Evidence, StepComparison, TensorComparison, UpdateRecord
from lockstep.proof.rank_dependence import design_notes, disable_dropout, measured_causes
from lockstep.proof.tolerances import EPS, NEGLIGIBLE_GRADIENT, NORMALIZING_OPTIMIZERS, Tolerance
from lockstep.training.publishing import publish

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.records import GlobalBatch, StepReport
    from lockstep.loop.session import Session

Tamper = Callable[["Session"], None]
_STEPS, _MEASURED = "steps.json", "measured.json"


def record_reference(session: Session, folder: Path, steps: int) -> list[str]:
    """Run the reference on one rank and record it in `folder`; return notes on what depends on ranks by design."""
    folder.mkdir(parents=True)
    notes = [*disable_dropout(components_of(session).sharding.state.model), *design_notes(session)]
    write_tensors(components_of(session).sharding.state.weights(), folder / _weights_file(0))
    records: list[UpdateRecord] = []
    for batch in _first_batches(session, steps):
        scale = float(components_of(session).update.scaler.scale)
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
    """A run and its reference. All ranks take part; rank 0 compares.

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
        self.evidence = Evidence(measured=json.loads((folder / _MEASURED).read_text()))

    def run(self, tamper: Tamper | None) -> None:
        """Train and compare; an error of the session is raised after `evidence` has what came before."""
        session, evidence = self._session, self.evidence
        disable_dropout(components_of(session).sharding.state.model)
        evidence.notes = design_notes(session)
        evidence.initial = self._compare(self._weights(), _weights_file(0), _bitwise)
        if tamper is not None:
            tamper(session)
        for batch in _first_batches(session, min(self._steps, len(self._reference))):
            reference = self._reference[batch.step]
            scale = float(components_of(session).update.scaler.scale)
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
            step.weights = self._compare(self._weights(), _weights_file(batch.step + 1), self._relative_to_rate())
            step.unequal = _unequal_parameter(session)
        self._compare_published()

    def _compare_published(self) -> None:
        """Publish the weights and compare the files, on rank 0. All ranks take part."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:  # the first rank's is used
            try:
                place = publish(self._session, lambda: Path(folder))
            except RunFailed as failure:
                self.evidence.failure = str(failure)
                return
            if self._compares:
                expected = read_weights(self._folder / place.relative_to(folder), adapters=True).tensors
                published = read_weights(place, adapters=True).tensors
                self.evidence.published = _published(published, expected, self._relative_to_rate())

    def _weights(self) -> NamedTensors:
        return components_of(self._session).sharding.state.weights(wanted=self._compares)

    def _compare(self, pairs: NamedTensors, name: str, measure: Measure) -> TensorComparison:
        """Compare on rank 0. All ranks take part, since the tensors are gathered one by one."""
        if not self._compares:
            for _ in pairs:
                pass
            return TensorComparison()
        return compare(pairs, self._folder / name, self._order, measure)

    def _gradient_slack(self) -> float:
        """Return how much the gradient may differ because the weights do.

        Only a normalizing optimizer makes more of rounding than rounding.
        """
        before = self.evidence.steps[-1].weights if self.evidence.steps else None
        return min(before.worst, self._weight_tolerance) if before is not None and self._normalizes else 0.0

    def _relative_to_norm(self, global_norm: float, tolerance: float) -> Measure:
        """Measure relative to the parameter's gradient norm, or a share of the global one if larger."""

        def measure(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
            deviation, norm = (run - expected).norm().item(), expected.norm().item()
            if norm <= NEGLIGIBLE_GRADIENT * global_norm:
                self._negligible.add(name)
            unit = max(norm, self._tolerance.noise * global_norm)
            difference = deviation / unit if unit else (0.0 if deviation == 0 else math.inf)
            return difference, not difference <= tolerance

        return measure

    def _relative_to_rate(self) -> Measure:
        """Measure the root mean square relative to the summed learning rate, beyond rounding of weights."""
        summed_rate, updates = self.evidence.summed_rate, len(self._records)

        def measure(name: str, run: Tensor, expected: Tensor) -> tuple[float, bool]:
            if self._normalizes and name in self._negligible:
                return 0.0, False
            root = max(1, expected.numel()) ** 0.5
            deviation = (run - expected).norm().item() / root
            rounding = updates * EPS * expected.norm().item() / root
            return deviation / (summed_rate or 1.0), not deviation <= self._weight_tolerance * summed_rate + rounding

        return measure


# --- records ------------------------------------------------------------------------------------------------------


def _first_batches(session: Session, steps: int) -> Iterator[GlobalBatch]:
    for batch in session.batches():
        yield batch
        if batch.step + 1 >= steps:
            return


def _gather_record(session: Session, batch: GlobalBatch) -> UpdateRecord:
    """Return the record of a step that isn't committed yet. All ranks take part."""
    components = components_of(session)
    own = (batch.count, batch.digest)
    gathered = cast("list[Any]", components.world.axis.gather(own if components.position.reports_counts else None))
    ranks = [record for record in gathered if record is not None]
    return UpdateRecord(
        step=batch.step,
        count=float(sum(count for count, _ in ranks)),
        samples=session.progress.samples + batch.samples,
        digest=sum(part for _, part in ranks) % MODULUS,
    )


def _add_report(records: list[UpdateRecord], report: StepReport) -> None:
    record = records[report.step - 1]
    record.reported = True
    record.loss = report.loss if report.count else 0.0
    record.norm, record.rate, record.kept = report.grad_norm, report.lr, report.kept


def _unequal_parameter(session: Session) -> str | None:
    """Return the first replicated parameter with different values on different ranks. All ranks take part."""
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
    model = components_of(session).sharding.state.model
    own = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # tied ones under all their names
    gathered = cast("list[Any]", components_of(session).world.axis.gather(own))
    return {name: place for place, name in enumerate(dict.fromkeys(name for names in gathered for name in names))}


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


def compare(pairs: NamedTensors, path: Path, order: Mapping[str, int], measure: Measure) -> TensorComparison:
    """Compare all tensors of a run with a file of the reference.

    Args:
        order: Position of each name in the model; other names are ignored.
    """
    comparison = TensorComparison()
    dot = run_square = reference_square = 0.0
    with cast("Any", safe_open)(path, framework="pt") as reference:
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
            dot += (run * expected).sum().item()
            run_square += run.square().sum().item()
            reference_square += expected.square().sum().item()
            if too_much:
                comparison.deviating += 1
                if comparison.first is None or order[name] < order[comparison.first]:
                    comparison.first, comparison.first_difference = name, difference
        comparison.missing = sorted(missing, key=order.__getitem__)
    comparison.factor, comparison.residual = _fit(dot, run_square, reference_square)
    return comparison


def _published(run: Mapping[str, Tensor], expected: Mapping[str, Tensor], measure: Measure) -> dict[str, str]:
    differing = {name: "is unexpected" for name in run if name not in expected}
    for name, reference in expected.items():
        if name not in run:
            differing[name] = "is missing"
        elif run[name].shape != reference.shape:
            differing[name] = "has another shape"
        elif measure(name, run[name].double(), reference.double())[1]:
            differing[name] = "has other values"
    return differing


def _larger(first: float, second: float) -> float:
    """Return the larger number; NaN is the largest of all."""
    return second if math.isnan(second) or second > first else first


def _fit(dot: float, run_square: float, reference_square: float) -> tuple[float, float]:
    """Return the factor c that brings c x reference nearest to the run, and the rest relative to the reference."""
    if not reference_square > 0 or not math.isfinite(dot):
        return 1.0, math.inf if run_square or not math.isfinite(dot) else 0.0
    factor = dot / reference_square
    return factor, math.sqrt(max(0.0, run_square - factor * dot) / reference_square)
