"""metrics.jsonl, events.jsonl and summary.json: the run for programs.

metrics.jsonl has updates: the first, every `every`-th, each discarded one, each spike, and the last.

    {"step": 10, "samples": 640, ..., "loss": 3.21, "grad_norm": 0.8, "lr": 0.001, ...}

events.jsonl has what happens between them:

    {"evaluation": "held-out", "step": 10, "loss": 3.0, "bits_per_byte": 4.3, ...}         each evaluation
    {"epoch_done": 0, "step": 112, "loss": 3.1, ...}                                       each epoch
    {"logged": {"accuracy": 0.5}, "step": 10}                                              what user code logged
    {"logged": {"attention": {"width": 64, "height": 64, "file": "media/attention-00000010.png"}}, "step": 10}
    {"saved": 10, "step": 10, "bytes": 3805184, "seconds": 0.2, "lost_seconds": 0.001}     each save; `failure` if none
    {"left_out": 17, "step": 10, "reason": "OSError: ...", "position": 661}                each unusable sample
    {"bad_numbers": "rolled back", "step": 8, "update": 12, "what": "loss nan, ...", "samples": [17, ...], ...}
    {"resumed": 10, "step": 10, "ranks": 2}                                                each attempt but the first

summary.json, which is also the last line of `--json`, marks a finished run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.core.files import opened_regular
from lockstep.core.progress import Progress
from lockstep.core.records import (
    EvaluationReport,
    LeftOutSample,
    NumbersReport,
    Request,
    RunInfo,
    SaveReport,
    StepReport,
)
from lockstep.monitor.jsonl import LineFile, as_number, finite, line, parsed
from lockstep.monitor.media import MEDIA, MediaFolder
from lockstep.monitor.meters import Throughput
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport, ReportWriter

EVENTS = "events.jsonl"
_BLOCK = 1 << 10
_BLOCKS = 16
_END = 1 << 14
_STEP = ("step", "samples", "tokens", "epoch", "loss", "count", "grad_norm", "lr", "kept")
RUN_FACTS = (
    *("strategy", "ranks", "backend", "device", "precision", "global_size"),
    *("parameters", "trainable", "flops_per_token", "peak_flops"),
)
"""The facts about a run that its summary has."""
_MANY = 20  # in a row: more than a new loss scale of fp16 needs


class EventLog(ReportWriter):
    """Writes metrics.jsonl, and events.jsonl and media/ beside it. Rates are since the line before."""

    def __init__(self, path: Path, every: int) -> None:
        self._every = every
        self._metrics = LineFile(path)
        self._events = LineFile(path.with_name(EVENTS))
        self._media = MediaFolder(path.with_name(MEDIA))
        self._throughput = Throughput(window=0.0)
        self._pending: StepReport | None = None
        self._first = True

    @property
    def files(self) -> tuple[LineFile, ...]:
        """metrics.jsonl and events.jsonl."""
        return self._metrics, self._events

    def start(self, info: RunInfo) -> None:
        if info.resumed_from is not None:
            self._events.write(line({"resumed": info.resumed_from, "step": info.resumed_from, "ranks": info.ranks}))

    def see(self, report: StepReport) -> Iterable[Request]:
        if self._first:
            self._first = False
            self._throughput.add(report)
        if report.step == 1 or report.step % self._every == 0 or not report.kept or report.spike:
            self._write_step(report)
        else:
            self._pending = report
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._throughput.pause(report.step, report.seconds)
        record = {"evaluation": report.name, "step": report.step, "samples": report.samples, "seconds": report.seconds}
        metrics = {f"metric.{name}" if name in record else name: value for name, value in report.metrics.items()}
        self._events.write(line({**record, **metrics}))
        return ()

    def saved(self, report: SaveReport) -> None:
        record = {
            "saved": report.step,
            "step": report.step,
            "bytes": report.size,
            "seconds": round(report.seconds, 6),
            "lost_seconds": round(report.lost, 6),
        }
        self._events.write(line(record if report.failure is None else {**record, "failure": report.failure}))

    def epoch(self, report: EpochReport) -> None:
        record = asdict(report)
        self._events.write(line({"epoch_done": record.pop("epoch"), **record}))

    def logged(self, step: int, logged: Logged) -> None:
        histograms = {
            name: {
                "bins": histogram.bins(),  # [low, high, count]
                "count": histogram.count,
                "low": histogram.low,
                "high": histogram.high,
                "sum": histogram.total,
                "not_finite_count": histogram.not_finite,
            }
            for name, histogram in logged.histograms.items()
        }
        media = self._media.write(step, logged.media)
        if own := {**logged.values, **histograms, **logged.texts, **media}:
            self._events.write(line({"logged": own, "step": step}))

    def left_out(self, step: int, samples: Sequence[LeftOutSample]) -> None:
        for sample in samples:
            self._events.write(
                line({"left_out": sample.index, "step": step, "reason": sample.reason, "position": sample.position})
            )

    def bad_numbers(self, report: NumbersReport) -> None:
        record = asdict(report)
        self._events.write(line({"bad_numbers": record.pop("action"), **record}))

    def finish(self, error: BaseException | None) -> None:
        if self._pending is not None:
            self._write_step(self._pending)

    def _write_step(self, report: StepReport) -> None:
        self._pending = None
        self._throughput.add(report)
        rates = self._throughput.moving
        record = {
            **{name: getattr(report, name) for name in _STEP},
            "loss": report.loss if report.count else None,
            "verdict": report.verdict.name.lower(),
            "discarded": report.discarded,
            "spike": report.spike or None,
            "loss_scale": report.loss_scale,
            "seconds": round(report.seconds, 6),
            "samples_per_second": rates.samples,
            "tokens_per_second": rates.tokens,
        }
        self._metrics.write(line(record))


def summarize(
    facts: RunInfo, progress: Progress, last: StepReport | None, evaluations: Iterable[EvaluationReport], seconds: float
) -> dict[str, Any]:
    """Return the content of summary.json; `seconds` is the wall clock over all attempts, with evaluations."""
    summary: dict[str, Any] = finite(
        {
            "run": facts.folder,
            "recipe": facts.recipe,
            "steps": progress.steps,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "seconds": round(seconds, 3),
            "evaluation": metrics_by_set(evaluations),
            "loss": last.loss if last else None,
            "discarded": last.discarded if last else 0,
            **{name: getattr(facts, name) for name in RUN_FACTS},
        }
    )
    return summary


def metrics_by_set(evaluations: Iterable[EvaluationReport]) -> Mapping[str, Any]:
    """Return the last metrics of each set by name."""
    return {report.name: dict(report.metrics) for report in evaluations}


def passed_discards(discarded: Collection[int], last: int) -> set[int]:
    """Return the steps of discarded updates, without a long streak that ends at the last update."""
    steps, kept = {*discarded}, last
    while kept in steps:
        kept -= 1
    return {step for step in steps if step <= kept} if last - kept >= _MANY else steps


def sampled_losses(file: Path) -> list[tuple[int, float]]:
    """Return step and loss of some records of metrics.jsonl, the first and the last among them; NaN: not finite.

    Updates without a sample have none. Discarded updates count only if they are many in a row at the end.
    """
    try:
        with opened_regular(file) as handle:
            size = os.fstat(handle).st_size
            if size <= _BLOCK * _BLOCKS:
                parts = [os.pread(handle, size, 0)]
            else:
                begins = ((size - _BLOCK) * number // (_BLOCKS - 1) for number in range(_BLOCKS - 1))
                parts = [*(os.pread(handle, _BLOCK, begin) for begin in begins), os.pread(handle, _END, size - _END)]
    except OSError:
        return []
    lines = (parsed(text) or {} for part in parts for text in part.split(b"\n"))
    records = [line for line in lines if as_number(line.get("step")) >= 0 and line.get("count") != 0]
    losses = {int(record["step"]): as_number(record.get("loss")) for record in records}
    discarded = [int(record["step"]) for record in records if record.get("kept") is False]
    gone = passed_discards(discarded, max(losses, default=0))
    return sorted((step, loss) for step, loss in losses.items() if step not in gone)
