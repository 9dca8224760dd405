"""Compares a trace with what the plan of its run predicts: computation at the peak, optimizer, bytes sent, the update.

attempts.jsonl   operations, peaks, bytes that the plan holds and sends   -->  predicted
the trace        phases, kernels, collectives                             -->  measured
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.core.formatting import short_time, size
from lockstep.monitor.attempts import read_attempts
from lockstep.profiling.traces import Trace
from lockstep.report.roofline import DevicePeak, Roofline
from lockstep.report.run_data import read_run

_CLOSE = 1.25
_VOTE = 1 << 16  # bytes from which others than those of the plan are named: the vote of an update has fewer
_MEANINGS = {
    "computation": "operators don't reach the device's peak: they are small, limited by memory, or not in its fastest "
    "precision",
    "optimizer": "the optimizer reads and writes its state more often than once, or has many small tensors",
    "communication": "other ranks come later, or links are slower than the bytes need",
    "bytes sent": "the strategy, or the model's own code, exchanges other tensors than the plan counts",
}


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of an update, predicted and measured: seconds, or bytes of those that are sent."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else 1.0

    @property
    def is_bytes(self) -> bool:
        return self.name == "bytes sent"


@dataclass(frozen=True, slots=True)
class BesidePlan:
    """The slowest trace of a run beside the plan.

    Attributes:
        factors: Those that can be predicted.
        unknown: Why computation can't be; may be empty.
        mfu: Share of the devices' peak that the model's operations use in the traced updates; None: not known.
    """

    factors: tuple[Factor, ...]
    unknown: str
    mfu: float | None

    def record(self) -> dict[str, Any]:
        """Return it for programs."""
        return {"factors": [{**asdict(each), "ratio": each.ratio} for each in self.factors], "mfu": self.mfu}

    @property
    def worst(self) -> Factor | None:
        """The factor that costs most more than predicted; bytes only if they aren't those of the plan."""
        parts = [each for each in self.factors if each.name in _MEANINGS and each.ratio > _CLOSE]
        parts = [each for each in parts if not each.is_bytes or each.measured - each.predicted > _VOTE]
        seconds = [each for each in parts if not each.is_bytes]
        return max(seconds, key=lambda each: each.measured - each.predicted, default=next(iter(parts), None))


def beside_plan(run: Path, traces: Sequence[Trace], peak: DevicePeak | None = None) -> BesidePlan | None:
    """Return the prediction and the measurement; None if the run's folder has no plan.

    Args:
        peak: Of a rank's device, if it was measured; by default, that of its data sheet.
    """
    attempts = read_attempts(run)
    if not attempts or not traces:
        return None
    trace = max(traces, key=lambda trace: (trace.facts["first"], trace.computing))
    roofline = Roofline.of(attempts[-1], read_run(run).last, trace.seconds, peak)
    factors = [*_computation(trace, roofline), *_communication(trace, roofline)]
    if roofline.bound is not None:
        factors.append(Factor("update", roofline.bound, trace.seconds))
    return BesidePlan(tuple(factors), _unknown(roofline), roofline.mfu)


def _computation(trace: Trace, roofline: Roofline) -> Iterator[Factor]:
    planned, bandwidth = roofline.attempt.planned, roofline.attempt.number("memory_bandwidth")
    optimizer = 2 * planned.held / bandwidth if bandwidth and planned.held else None
    if trace.device is not None:  # kernels of the optimizer are among them
        if roofline.compute is not None:
            yield Factor("computation", roofline.compute + (optimizer or 0.0), trace.device.busy * trace.seconds)
        return
    if roofline.compute is not None:
        model = trace.split.get("forward", 0.0) + trace.split.get("backward", 0.0)
        yield Factor("computation", roofline.compute, model)
    if optimizer is not None:
        yield Factor("optimizer", optimizer, trace.split.get("optimizer", 0.0))


def _communication(trace: Trace, roofline: Roofline) -> Iterator[Factor]:
    sent = roofline.attempt.planned.sent
    if not sent or not trace.collectives:
        return
    measured = sum(use.bandwidth * use.seconds for use in trace.collectives)
    yield Factor("bytes sent", sent, measured)
    fastest = max(use.bandwidth for use in trace.collectives)
    if fastest:
        waits = trace.split.get("communication", 0.0) if trace.device is None else trace.device.exposed
        yield Factor("communication", sent / fastest, waits)


def _unknown(roofline: Roofline) -> str:
    if roofline.compute is not None:
        return ""
    if roofline.flops is None:
        return "the operations of the model aren't known; --measure counts them"
    return f"the peak of {roofline.attempt.facts.get('device')} isn't known; --measure measures it"


def plan_lines(beside: BesidePlan) -> Iterator[str]:
    """Yield the comparison for people."""
    if beside.factors:
        yield f"{'beside the plan':<18}{'predicted':>12}{'measured':>12}{'ratio':>8}"
    for each in beside.factors:
        predicted, measured = (
            (size if each.is_bytes else short_time)(value) for value in (each.predicted, each.measured)
        )
        yield f"  {each.name:<16}{predicted:>12}{measured:>12}{each.ratio:>8.2f}"
    if beside.unknown:
        yield f"  computation isn't predicted: {beside.unknown}"
    if beside.mfu is not None:
        yield f"  MFU {beside.mfu:.1%} of the devices' peak"
    if (worst := beside.worst) is not None:
        yield f"  most differs: {worst.name}, {worst.ratio:.1f} times what is predicted: {_MEANINGS[worst.name]}"
