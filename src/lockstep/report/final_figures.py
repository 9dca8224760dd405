"""The final figures of a run: loss, metrics, speed, time split, memory, duration. Each may be compared with another's.

summary.json > the last line of metrics.jsonl       ranks.jsonl: times, memory       attempts.jsonl: MFU, goodput
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.core import formatting
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.goodput import goodput
from lockstep.report.curves import throughput
from lockstep.report.facts import last_evaluations
from lockstep.report.rank_history import RankHistory
from lockstep.report.run_data import RunData
from lockstep.report.scales import value_text

_MEMORY = ("memory_allocated_peak", "memory_resident_peak", "memory_allocated", "memory_resident")

Kind = Literal["value", "percent", "seconds", "rate", "bytes", "count"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A final figure of a run; its value may be NaN, as a loss is."""

    value: float
    kind: Kind

    @property
    def text(self) -> str:
        return figure_text(self.value, self.kind)


def figure_text(value: float, kind: Kind) -> str:
    """Return a figure as people read it."""
    if not math.isfinite(value):
        return "not finite"
    if kind == "seconds":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else formatting.duration(value)
    if kind == "bytes":
        return formatting.size(value)
    if kind == "count":
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return value_text(value, "plain" if kind == "value" else kind)


def final_figures(run: RunData, ranks: RankHistory) -> Iterator[tuple[str, Figure]]:
    """Yield name and value of each figure that is known."""
    loss, summary = run.trained_loss, run.summary or {}
    if len(loss.steps):
        yield "training loss", Figure(float(loss.values[-1]), "value")
    for name, metrics in last_evaluations(run).items():
        for metric, (_, value) in metrics.items():
            yield (
                f"{name} {metric.replace('_', ' ')}",
                Figure(value, "percent" if metric.endswith("accuracy") else "value"),
            )
    candidates: list[tuple[str, float | None, Kind]] = [
        ("step time", ranks.step_seconds() or _step_seconds(run), "seconds"),
        ("samples/s", _median(run, "samples_per_second"), "rate"),
        ("tokens/s", _median(run, "tokens_per_second") if throughput(run).name == "tokens" else None, "rate"),
        ("MFU", _utilization(run), "percent"),
    ]
    split = ranks.split()
    whole = sum(split.values())
    candidates += [(f"time in {name}", seconds / whole, "percent") for name, seconds in split.items() if seconds > 0]
    used = goodput(run.folder)
    peaks = (ranks.peak(gauge) for gauge in _MEMORY)
    peak = next((peak for peak in peaks if peak is not None), None)
    candidates += [
        ("memory, most of a rank", peak[0] if peak is not None else None, "bytes"),
        ("duration", _number(summary.get("seconds", run.last.get("seconds"))), "seconds"),
        ("steps", _number(summary.get("steps", run.last.get("step"))), "count"),
        ("goodput", used.share if used is not None else None, "percent"),
        ("attempts", run.num_attempts, "count"),
        ("steps rolled back", sum(last - first for first, last in run.rollbacks) or None, "count"),
        ("updates discarded", len(run.discarded) or None, "count"),
    ]
    for name, number, kind in candidates:
        if number is not None and math.isfinite(number):
            yield name, Figure(float(number), kind)


def _step_seconds(run: RunData) -> float | None:
    """Return the seconds of a step at the median of the samples per second, where ranks.jsonl has no times."""
    samples, steps = (_number(run.last.get(name)) for name in ("samples", "step"))
    speed = _median(run, "samples_per_second")
    return samples / steps / speed if samples and steps and speed else None


def _median(run: RunData, column: str) -> float | None:
    known = run.columns[column].known
    known = known[known > 0]
    return float(np.median(known)) if len(known) else None


def _utilization(run: RunData) -> float | None:
    """Return the MFU of the last attempt at the median of the tokens per second; None if it isn't known."""
    attempts, tokens = read_attempts(run.folder), _median(run, "tokens_per_second")
    return attempts[-1].utilization(tokens) if attempts and tokens else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number and isinstance(value, int | float) else None
