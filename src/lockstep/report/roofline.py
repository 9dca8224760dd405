"""Bounds for the time of an update, and how far a run is from them: its plan's and its devices'.

    operations of an update / peak of all devices          computation, at the peak
    bytes of weights, gradients, state / bandwidth         memory: each read and written as seldom as possible
    the larger of both / (1 - bubble of the pipeline)      no update is faster (Williams et al. 2009, "Roofline")

Activations aren't counted as bytes: the bound of the memory is lower than the truth. Peaks are those of data sheets, or
measured when they were asked for; they are never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.core import formatting
from lockstep.monitor.attempts import Attempt
from lockstep.report.rank_history import RankHistory
from lockstep.strategies.record import ELEMENT_BYTES

_NOTABLE = 0.01
_WORTH = 0.05  # of an update


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The peak of a rank's device, as it was measured.

    Attributes:
        flops: Operations per second.
        bandwidth: Bytes of its memory per second.
        flops_per_token: Operations of the run's model, if they were counted with it.
        uncounted: Why they couldn't be.
    """

    flops: float
    bandwidth: float
    flops_per_token: float | None = None
    uncounted: str = ""


@dataclass(frozen=True, slots=True)
class Roofline:
    """An update beside its bounds, in seconds; None: not known.

    Attributes:
        seconds: Of an update.
        flops: Operations of an update, over all ranks.
        compute, memory: The bounds.
        bubble: Share of the time that a rank of a pipeline waits by the plan.
        measured: Whether the peaks were measured; otherwise they are of data sheets.
        uncounted: Why the operations couldn't be counted with them.
    """

    attempt: Attempt
    seconds: float
    flops: float | None
    compute: float | None
    memory: float | None
    bubble: float
    measured: bool
    uncounted: str = ""

    @classmethod
    def of(cls, attempt: Attempt, last: Mapping[str, Any], seconds: float, peak: DevicePeak | None = None) -> Roofline:
        """Compute the bounds of a run.

        Args:
            last: The last line of metrics.jsonl.
            seconds: Of an update.
            peak: Of a rank's device, if it was measured.
        """
        if peak is not None:
            facts = {**attempt.facts, "peak_flops": peak.flops, "memory_bandwidth": peak.bandwidth}
            if peak.flops_per_token is not None:
                facts["flops_per_token"] = peak.flops_per_token
            attempt = replace(attempt, facts=facts)
        per_token, tokens, steps = attempt.number("flops_per_token"), last.get("tokens"), last.get("step")
        flops = None
        if per_token is not None and isinstance(tokens, int | float) and isinstance(steps, int) and steps > 0:
            flops = per_token * tokens / steps
        most, bandwidth, ranks = (attempt.number(name) for name in ("peak_flops", "memory_bandwidth", "ranks"))
        return cls(
            attempt,
            seconds,
            flops,
            flops / (most * ranks) if flops and most and ranks else None,
            bytes_of(attempt) / bandwidth if bandwidth else None,
            attempt.planned.bubble,
            peak is not None,
            peak.uncounted if peak is not None else "",
        )

    @property
    def bound(self) -> float | None:
        """The seconds that an update takes at least; None if they aren't known."""
        known = [bound for bound in (self.compute, self.memory) if bound is not None]
        return max(known) / (1.0 - min(self.bubble, 0.99)) if self.compute is not None else None

    @property
    def mfu(self) -> float | None:
        """The share of the devices' peak that the model's operations use."""
        return self.compute / self.seconds if self.compute is not None and self.seconds > 0 else None


def bytes_of(attempt: Attempt) -> float:
    """Return the bytes that a rank's memory moves in an update at least.

    Each micro-batch reads the weights in its forward and in its backward; gradients are written and read once; the
    optimizer reads and writes weights and state.
    """
    planned = attempt.planned
    whole = attempt.number("parameters") or 0.0
    width = ELEMENT_BYTES.get(str(attempt.facts.get("precision")), 4)
    weights = whole * width if planned.sent is not None else float(planned.parameters)  # else it is divided
    micro_batches = attempt.number("accumulation") or 1.0
    return 2 * micro_batches * weights + 2 * (planned.gradients + planned.optimizer + planned.parameters)


def sentences(roofline: Roofline, run: str) -> Iterator[str]:
    """Yield what an update takes beside the bounds.

    Args:
        run: The command that measures the peak.
    """
    attempt, flops = roofline.attempt, roofline.flops
    ranks = attempt.number("ranks") or 1.0
    device, precision = attempt.facts.get("device"), attempt.facts.get("precision")
    if flops is None:
        why = f"can't be counted{f': {roofline.uncounted}' if roofline.uncounted else ''}"
        if device == "cpu" and not roofline.measured:
            why = f"aren't counted on a CPU while it trains: {run} counts them"
        yield f"Its MFU isn't known: the operations of its model {why}."
        return
    achieved = f"It computes {_flops(flops / roofline.seconds / ranks)} on each rank"
    peak = attempt.number("peak_flops")
    if peak is None or roofline.compute is None or roofline.mfu is None or roofline.bound is None:
        yield f"{achieved}; its MFU isn't known, as the peak of {device} isn't: {run} measures it."
        return
    source = "measured now" if roofline.measured else "data sheet"
    bounds = f"computation alone would take {formatting.short_time(roofline.compute)} of an update"
    if roofline.memory is not None:
        bounds += f", and moving weights, gradients and optimizer state {formatting.short_time(roofline.memory)}"
    pipeline = f" (its pipeline waits {roofline.bubble:.0%} by the plan)" if roofline.bubble > _NOTABLE else ""
    yield (
        f"{achieved}, {100 * roofline.mfu:.1f} % (MFU) of the {_flops(peak)} of {device} in {precision} ({source}): at "
        f"the peaks, {bounds}{pipeline}; it takes {roofline.seconds / roofline.bound:.1f} times its bound"
    ) + "."


def communication(roofline: Roofline, ranks: RankHistory) -> Iterator[str]:
    """Yield what ranks send by the plan, beside how long they wait for each other."""
    sent = roofline.attempt.planned.sent
    waited = ranks.split().get("communication", 0.0)
    if not sent or not waited >= _WORTH * roofline.seconds:
        return
    yield (
        f"By its plan a rank sends {formatting.size(sent)} in an update; it waited {formatting.short_time(waited)} for "
        f"other ranks, as on a link with {formatting.size(sent / waited)}/s if nothing else made it wait."
    )


def memory(attempt: Attempt | None, ranks: RankHistory) -> Iterator[str]:
    """Yield the peak of the memory beside what the plan holds."""
    for gauge, what in (("memory_allocated_peak", "of the device"), ("memory_resident_peak", "resident")):
        peak = ranks.peak(gauge)
        if peak is None:
            continue
        beside = ""
        if attempt is not None and attempt.planned.held:
            held = attempt.planned
            parts = f"{formatting.size(held.parameters)} weights, {formatting.size(held.gradients)} gradients, "
            rest = "activations, buffers" + (" and the process itself" if what == "resident" else "")
            beside = (
                f"; by its plan {formatting.size(held.held)} are {parts}{formatting.size(held.optimizer)} optimizer "
                f"state, the rest is {rest}"
            )
        yield f"At most {formatting.size(int(peak[0]))} {what} were used, by rank {peak[1]}{beside}."
        return


def _flops(number: float) -> str:
    for size, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e6:.3g} MFLOP/s"
