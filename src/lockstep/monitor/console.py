"""The terminal monitor: the plan at the start, the progress of the run, live or in plain lines, and its result."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TextIO

from lockstep.core import formatting
from lockstep.core.errors import Failure, RolledBack, Stopped, blames_a_peer
from lockstep.core.failure_kinds import Retry
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import EvaluationReport, Request, RunInfo, SaveReport, StepReport, Verdict
from lockstep.core.terminal import plain, plain_line
from lockstep.monitor.live import LiveDisplay, Status
from lockstep.monitor.meters import Rates, Throughput, model_flops_utilization
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport, ReportWriter
from lockstep.monitor.nvidia import gpu_facts, gpu_line
from lockstep.monitor.rank_meters import MeterReport
from lockstep.plan.batch import BatchPlan

Progress = Literal["auto", "live", "plain", "none"]

_MIN_SECONDS = 1.0  # between plain lines
_SHARE = 0.01  # of the run's time, between plain lines of a long run
_LONGEST_SECONDS = 30.0  # that this makes
_MAX_SECONDS = 15.0  # more than that
_LONGEST_TEXT = 1000
_LOGGED_VALUES = 3
_STRAGGLERS = 3
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_NOT_CI = ("", "0", "false")
_INTERRUPTED = "interrupted after"  # ranks start again, or another rank reports the failure


class Console(ReportWriter):
    """Prints to a stream, by default standard output. A stream that breaks gets nothing more, and the run continues.

    Args:
        every: Steps between plain lines.
        progress: `auto`: live on a terminal; plain elsewhere and in CI, with times in the log of a batch job. `none`:
            only start, evaluations and end.
    """

    def __init__(self, every: int, progress: Progress = "auto", stream: TextIO | None = None) -> None:
        self._every = every
        self._output = Output(sys.stdout if stream is None else stream, progress)
        self._progress: Progress = "live" if self._output.live else "plain" if progress == "auto" else progress
        self._facts: RunInfo | None = None
        self._throughput = Throughput()
        self._values: Mapping[str, float] = {}
        self._evaluations: dict[str, EvaluationReport] = {}
        self._last: StepReport | None = None
        self._split: dict[str, float] = {}  # by phase, weighted by intervals
        self._slow: set[int] = set()
        self._gpus = GpuHealth()
        self._printed_step = 0
        self._next_line = self._next_drawing = self._next_overflow = self._next_epoch = 0.0  # seconds of the run

    def start(self, info: RunInfo) -> None:
        self._facts = info
        for line in run_info(info):
            self._output.print(line)
        self._output.start()

    def see(self, report: StepReport) -> Iterable[Request]:
        self._last = report
        self._throughput.add(report)
        if report.verdict is Verdict.OVERFLOW and report.seconds >= self._next_overflow:  # `bad_updates` names others
            self._next_overflow = report.seconds + _MIN_SECONDS
            why = f"fp16 overflow, loss scale {report.loss_scale:g}"
            self._output.print(f"step {report.step:,}: update discarded ({why}); {report.discarded:,} so far")
        if self._progress == "live" and report.seconds >= self._next_drawing:
            self._next_drawing = report.seconds + self._output.draw(self._status(report))
        elif self._progress == "plain" and self._wants_line(report):
            self._print_step(report)
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._throughput.pause(report.step, report.seconds)
        self._evaluations[report.name] = report
        metrics, seconds = formatting.metrics(report.metrics), formatting.duration(report.seconds)
        size = f"({formatting.counted(report.samples, 'sample')} in {seconds})"
        self._output.print(f"step {report.step:,}: evaluation {report.name}: {metrics} {size}")
        return ()

    def saved(self, report: SaveReport) -> None:
        if report.failure is None:
            size, seconds = formatting.size(report.size), formatting.duration(report.seconds)
            text = f"saved ({size} in {seconds}, training waited {formatting.duration(report.lost)})"
        elif report.made_room:
            text = f"NOT saved: {report.failure}; an older checkpoint was deleted to free space: saving again"
        elif report.newest is None:
            text = f"NOT saved: {report.failure}; there is no checkpoint"
        else:
            text = f"NOT saved: {report.failure}; the newest checkpoint is of step {report.newest:,}"
        self._output.print(f"step {report.step:,}: {text}")

    def epoch(self, report: EpochReport) -> None:
        if self._last is None or self._last.seconds < self._next_epoch:
            return
        self._next_epoch = self._last.seconds + _MIN_SECONDS
        part = "" if report.whole else ", since it was resumed"
        loss = f"mean loss {formatting.value(report.loss)}" if report.loss == report.loss else "no update was kept"
        seconds = formatting.duration(report.seconds)
        self._output.print(f"step {report.step:,}: epoch {report.epoch + 1} done: {loss}, {seconds}{part}")

    def logged(self, step: int, logged: Logged) -> None:
        self._values = {**self._values, **logged.values}
        for name, text in logged.texts.items():
            shown = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " ..."
            self._output.print(f"step {step:,}: {plain_line(name)}: {shown}")

    def measured(self, report: MeterReport) -> None:
        for line in self._gpus.lines(report):
            self._output.print(f"step {report.step:,}: {line}")
        for name, seconds in report.split().items():
            self._split[name] = self._split.get(name, 0.0) + seconds * report.seconds
        stragglers = report.stragglers()
        slow = {straggler.rank for straggler in stragglers}
        for straggler in stragglers[:_STRAGGLERS]:
            if straggler.rank not in self._slow:
                self._output.print(
                    f"step {report.step:,}: rank {straggler.rank} on {straggler.host} computes {straggler.ratio:.1f} "
                    f"times as long as the others, above all in {straggler.phase}: they wait for it"
                )
        self._slow = slow

    def finish(self, error: BaseException | None) -> None:
        last = self._last
        if self._progress == "plain" and last is not None and last.step > self._printed_step:
            self._print_step(last)
        self._output.stop()
        if self._facts is not None:
            for line in self._summary(self._facts, error):
                self._output.print(line)

    def _wants_line(self, report: StepReport) -> bool:
        if report.step <= self._printed_step:
            return False
        if self._facts is not None and report.step == self._facts.steps:
            return True
        if report.seconds < self._next_line:
            return False
        is_late = report.seconds >= self._next_line + _MAX_SECONDS
        return is_late or self._printed_step == 0 or report.step % self._every == 0

    def _print_step(self, report: StepReport) -> None:
        self._printed_step = report.step
        self._next_line = report.seconds + min(max(_MIN_SECONDS, _SHARE * report.seconds), _LONGEST_SECONDS)
        status = self._status(report)
        steps = f"/{status.steps:,}" if status.steps is not None else ""
        parts = (f"step {status.step:,}{steps}", *status.parts, status.left)
        self._output.print("  ".join(part for part in parts if part))

    def _status(self, report: StepReport) -> Status:
        steps = self._facts.steps if self._facts else None
        left = self._throughput.remaining(report.step, steps)
        parts = [
            f"loss {_loss(report)}",
            *self._rates(self._throughput.moving),
            f"grad norm {formatting.value(report.grad_norm)}",
            f"lr {formatting.value(report.lr)}",
            *(formatting.metric(name, self._values[name]) for name in list(self._values)[:_LOGGED_VALUES]),
            *([f"{report.discarded:,} discarded"] if report.discarded else []),
            f"epoch {report.epoch + 1}",
        ]
        return Status(report.step, steps, f"{formatting.clock(left)} left" if left is not None else "", tuple(parts))

    def _rates(self, rates: Rates) -> list[str]:
        if not rates.steps:
            return []
        tokens = [f"{formatting.short(rates.tokens)} tokens/s"] if rates.tokens > rates.samples else []
        mfu = model_flops_utilization(self._facts, rates.tokens) if self._facts else None
        return [
            *tokens,
            *([f"MFU {100 * mfu:.1f} %"] if mfu is not None else []),
            f"{formatting.short(rates.samples)} samples/s",
            f"{formatting.short(rates.steps)} steps/s",
        ]

    def _summary(self, facts: RunInfo, error: BaseException | None) -> list[str]:
        end, last = _end_of(error), self._last
        step = (facts.resumed_from or 0) if last is None else last.step
        of = f" of {facts.steps:,}" if facts.steps is not None and step < facts.steps else ""
        if last is None:
            return [f"{end} {step:,}{of} steps", _row("folder", _shortest_path(facts.folder))]
        tokens = f", {last.tokens:,} tokens" if last.tokens > last.samples else ""
        head = f"{end} {last.step:,}{of} steps, {last.samples:,} samples{tokens} in {formatting.duration(last.seconds)}"
        if end == _INTERRUPTED:
            return [head]
        return [
            head,
            _row("loss", f"{_loss(last)} (of the last update)"),
            *(
                _row("evaluation", f"{name}: {formatting.metrics(report.metrics)} (step {report.step:,})")
                for name, report in self._evaluations.items()
            ),
            *([_row("speed", ", ".join(rates))] if (rates := self._rates(self._throughput.overall)) else []),
            *([_row("time", time_shares(self._split))] if self._split else []),
            _row("discarded", f"{last.discarded:,} of {last.step:,} updates" if last.discarded else "none"),
            _row("folder", _shortest_path(facts.folder)),
        ]


def _loss(report: StepReport) -> str:
    return formatting.value(report.loss) if report.count else "none"


def _end_of(error: BaseException | None) -> str:
    if error is None:
        return "done:"
    if isinstance(error, Stopped | KeyboardInterrupt):
        return "stopped after"
    is_final = isinstance(error, Failure) and error.kind.retry is Retry.NEVER
    starts_again = isinstance(error, RolledBack) or (started_by_lockstep(os.environ) and not is_final)
    return _INTERRUPTED if starts_again or blames_a_peer(error) else "failed after"


class GpuHealth:
    """Says what is wrong with GPUs, once for each rank."""

    def __init__(self) -> None:
        self._said: set[tuple[int, str]] = set()

    def lines(self, report: MeterReport) -> list[str]:
        ranks: dict[str, dict[int, str]] = {}
        for notice in (interval.notice for interval in report.ranks):
            for text in gpu_facts(notice.gauges):
                if (notice.rank, text) not in self._said:
                    self._said.add((notice.rank, text))
                    ranks.setdefault(text, {})[notice.rank] = notice.host
        return [gpu_line(who, text) for text, who in ranks.items()]


def time_shares(split: Mapping[str, float]) -> str:
    """Return the shares of an update's time by phase from half a percent on, the longest first."""
    whole = sum(split.values())
    longest = sorted(split.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * part / whole:.0f} %" for name, part in longest if part >= 0.005 * whole)


class Output:
    """Lines, and two live rows below them on a terminal. Nothing once the stream is broken."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream = stream
        self._broken = False
        try:
            self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        except ValueError:  # closed
            self._terminal = False
        is_ci = os.environ.get("CI", "").lower() not in _NOT_CI  # its logs keep all drawings, terminal or not
        self.live = progress == "live" or (progress == "auto" and self._terminal and not is_ci)
        self._has_times = not self._terminal and any(name in os.environ for name in _BATCH_JOBS)
        self._display: LiveDisplay | None = None

    def start(self) -> None:
        if self.live and not self._broken:
            self._display = LiveDisplay(self._stream)
            self._attempt(self._display.start)

    def print(self, text: str) -> None:
        if self._broken:
            return
        text = plain(text)
        if self._has_times:
            text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}"
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        display = self._display
        self._attempt(lambda: display.print(text) if display is not None else self._write(text))

    def draw(self, status: Status) -> float:
        """Draw the live rows, and return the seconds until it is worth drawing again."""
        display = self._display
        if self._broken or display is None:
            return math.inf
        self._attempt(lambda: display.show(status))
        return display.seconds_between_drawings

    def stop(self) -> None:
        if self._display is not None:
            self._attempt(self._display.stop)
            self._display = None

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError):  # the reader has gone, or the stream was closed
            self._broken = True
            _discard_buffer(self._stream)


def run_info(facts: RunInfo) -> list[str]:
    ranks, notes = formatting.counted(facts.ranks, "rank"), [_row("note", note) for note in facts.notes]
    if facts.again:
        return [f"{facts.recipe} again, on {ranks}", *notes]
    batch = BatchPlan(facts.global_size, facts.micro_size, facts.accumulation, facts.shares or facts.ranks)
    frozen = facts.parameters - facts.trainable
    parts = f" ({facts.trainable:,} trained, {frozen:,} frozen)" if frozen else ""
    epoch = f" ({facts.epoch_samples:,} samples an epoch)" if facts.epoch_samples else ""
    rows = {
        "strategy": f"{facts.strategy} on {ranks}, backend {facts.backend}",
        "device": facts.device,
        "precision": facts.precision,
        "parameters": f"{facts.parameters:,}{parts}",
        "batch": batch.product(facts.ranks),
        "steps": "until the budget is used up" if facts.steps is None else f"{facts.steps:,}{epoch}",
        "folder": _shortest_path(facts.folder),
    }
    return [facts.recipe, *(_row(name, text) for name, text in rows.items()), *notes]


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _shortest_path(folder: str) -> str:
    try:
        return min(os.path.relpath(folder), folder, key=len)
    except (OSError, ValueError):
        return folder


def _discard_buffer(stream: TextIO) -> None:
    """Discard what a broken standard output still buffers, which Python would fail on at exit."""
    if stream is not sys.__stdout__:
        return
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
