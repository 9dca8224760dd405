"""What a person sees: the plan at the start, the run while it runs, what it came to at the end.

on a terminal    a live display at the bottom (`live`), everything else scrolls above it
elsewhere        plain lines, `every` steps but not more than one a second, and one at least every 15 s
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TextIO

from lockstep.core import formatting
from lockstep.core.errors import Stopped
from lockstep.core.records import EvaluationReport, Request, RunInfo, SaveReport, StepReport, Verdict
from lockstep.core.terminal import plain, plain_line
from lockstep.monitor.live import LiveDisplay, Status, terminal_width
from lockstep.monitor.meters import Rates, Throughput, model_flops_utilization
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport, NextReport
from lockstep.plan.batch import BatchPlan

Progress = Literal["auto", "live", "plain", "none"]

_QUIET_SECONDS = 1.0
_LATE_SECONDS = 15.0
_LONGEST_TEXT = 1000
_LOGGED_VALUES = 3
_REASONS = {
    Verdict.KEPT: "kept",
    Verdict.OVERFLOW: "fp16 overflow",
    Verdict.NON_FINITE: "gradient not finite",
}


class Console:
    """Prints to a stream; a stream that breaks is left alone, and the run goes on.

    Args:
        every: steps between plain lines.
        progress: `auto`: live on a terminal, otherwise plain. `none`: no progress, but start, evaluations and end.
        stream: standard output if None.
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
        self._printed_step = 0
        self._quiet_until = 0.0
        self._draw_at = 0.0
        self._next_discarded = 0.0
        self._next_epoch = 0.0

    def start(self, facts: RunInfo) -> None:
        self._facts = facts
        for line in introduction(facts):
            self._output.print(line)
        self._output.start()

    def next_report(self) -> NextReport:
        if self._progress == "none" or self._last is None:
            return NextReport(math.inf, math.inf)
        if self._progress == "live":
            return NextReport(math.inf, self._draw_at)
        if self._last.seconds < self._quiet_until:
            return NextReport(math.inf, self._quiet_until)
        step = self._last.step
        return NextReport(step + self._every - step % self._every, self._quiet_until + _LATE_SECONDS)

    def see(self, report: StepReport) -> Iterable[Request]:
        self._last = report
        self._throughput.look(report)
        if not report.kept:
            self._print_discarded(report)
        if self._progress == "live":
            self._draw(report)
        elif self._progress == "plain" and self._is_due(report):
            self._print_step(report)
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._throughput.pause(report.step, report.seconds)
        self._evaluations[report.name] = report
        how = f"({report.samples:,} samples in {formatting.duration(report.seconds)})"
        self._output.print(
            f"step {report.step:,}: evaluation {report.name}: {formatting.metrics(report.metrics)} {how}"
        )
        return ()

    def saved(self, report: SaveReport) -> None:
        step = f"step {report.step:,}"
        if report.failure is not None:
            self._output.print(f"{step}: NOT saved: {report.failure}; {_after_failure(report)}")
            return
        how = f"{formatting.size(report.size)} in {formatting.duration(report.seconds)}"
        self._output.print(f"{step}: saved ({how}, training waited {formatting.duration(report.lost)})")

    def epoch(self, report: EpochReport) -> None:
        if self._last is None or self._last.seconds < self._next_epoch:
            return
        self._next_epoch = self._last.seconds + _QUIET_SECONDS
        part = "" if report.whole else ", since it was resumed"
        loss, seconds = formatting.value(report.loss), formatting.duration(report.seconds)
        self._output.print(f"step {report.step:,}: epoch {report.epoch + 1} done: mean loss {loss}, {seconds}{part}")

    def logged(self, step: int, logged: Logged) -> None:
        self._values = {**self._values, **logged.values}
        for name, text in logged.texts.items():
            cut = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " ..."
            self._output.print(f"step {step:,}: {plain_line(name)}: {cut}")

    def finish(self, error: BaseException | None) -> None:
        last = self._last
        if self._progress == "plain" and last is not None and last.step > self._printed_step:
            self._print_step(last)
        self._output.stop()
        for line in self._conclusion(error):
            self._output.print(line)

    # --- progress ---------------------------------------------------------------------------------------------------

    def _is_due(self, report: StepReport) -> bool:
        if report.step <= self._printed_step:
            return False
        if self._facts is not None and report.step == self._facts.steps:
            return True
        if report.seconds < self._quiet_until:
            return False
        late = report.seconds >= self._quiet_until + _LATE_SECONDS
        return late or self._printed_step == 0 or report.step % self._every == 0

    def _print_step(self, report: StepReport) -> None:
        self._printed_step = report.step
        self._quiet_until = report.seconds + _QUIET_SECONDS
        status = self._status(report)
        steps = f"/{status.steps:,}" if status.steps is not None else ""
        parts = (f"step {status.step:,}{steps}", *status.parts, status.left)
        self._output.print("  ".join(part for part in parts if part))

    def _draw(self, report: StepReport) -> None:
        if report.seconds < self._draw_at:
            return
        self._draw_at = report.seconds + self._output.draw(self._status(report))

    def _print_discarded(self, report: StepReport) -> None:
        if report.seconds < self._next_discarded:
            return
        self._next_discarded = report.seconds + _QUIET_SECONDS
        scale = f", loss scale {report.loss_scale:g}" if report.verdict is Verdict.OVERFLOW else ""
        self._output.print(
            f"step {report.step:,}: update discarded ({_REASONS[report.verdict]}{scale}); {report.discarded:,} so far"
        )

    def _status(self, report: StepReport) -> Status:
        steps = self._facts.steps if self._facts else None
        left = self._throughput.remaining(report.step, steps)
        return Status(
            report.step, steps, f"{formatting.clock(left)} left" if left is not None else "", self._parts(report)
        )

    def _parts(self, report: StepReport) -> tuple[str, ...]:
        """The important first: those at the end are left out where there is no room."""
        parts = [f"loss {formatting.value(report.loss)}", *self._rates(self._throughput.moving)]
        parts += [f"grad norm {formatting.value(report.grad_norm)}", f"lr {formatting.value(report.lr)}"]
        parts += [formatting.metric(name, self._values[name]) for name in list(self._values)[:_LOGGED_VALUES]]
        if report.discarded:
            parts.append(f"{report.discarded:,} discarded")
        return (*parts, f"epoch {report.epoch + 1}")

    def _rates(self, rates: Rates) -> list[str]:
        if not rates.steps:
            return []
        words = [f"{formatting.short(rates.tokens)} tokens/s"] if rates.tokens != rates.samples else []
        mfu = model_flops_utilization(self._facts, rates.tokens) if self._facts else None
        if mfu is not None:
            words.append(f"MFU {100 * mfu:.1f} %")
        return [*words, f"{formatting.short(rates.samples)} samples/s", f"{formatting.short(rates.steps)} steps/s"]

    # --- the end ----------------------------------------------------------------------------------------------------

    def _conclusion(self, error: BaseException | None) -> list[str]:
        facts, last = self._facts, self._last
        if facts is None:
            return []
        lines = [f"{_ending(error)} {_amount(facts, last)}"]
        if last is not None:
            lines.append(_row("loss", f"{formatting.value(last.loss)} (of the last update)"))
            lines += [_row("evaluation", f"{name}: {_found(report)}") for name, report in self._evaluations.items()]
            lines += [_row("speed", ", ".join(self._rates(self._throughput.overall)))]
            lines += [_row("discarded", f"{last.discarded:,} of {last.step:,} updates" if last.discarded else "none")]
        lines.append(_row("folder", _near(facts.folder)))
        return lines


class Output:
    """Lines, and two live rows below them on a terminal. Once the stream is broken, nothing.

    Attributes:
        live: whether there is a live display.
    """

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream = stream
        self._broken = False
        self._terminal = _is_terminal(stream)
        self.live = progress == "live" or (progress == "auto" and self._terminal)
        self._display: LiveDisplay | None = None

    def start(self) -> None:
        if self.live and not self._broken:
            self._display = LiveDisplay(self._stream)
            self._attempt(self._display.start)

    def print(self, text: str) -> None:
        if self._broken:
            return
        text = plain(text)
        if self._terminal:
            text = _wrapped(text, terminal_width(self._stream))
        encoding = self._stream.encoding or "utf-8"
        self._attempt(lambda: self._write(text.encode(encoding, "replace").decode(encoding)))

    def draw(self, status: Status) -> float:
        """Seconds until it is worth drawing again."""
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
        if self._display is not None:
            self._display.print(text)
            return
        self._stream.write(text + "\n")
        self._stream.flush()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError):  # the reader has gone, or the stream was closed
            self._broken = True
            _silence(self._stream)


def introduction(facts: RunInfo) -> list[str]:
    """What is printed before the first step."""
    ranks = f"{facts.ranks} rank{'s' if facts.ranks > 1 else ''}"
    batch = BatchPlan(facts.global_size, facts.micro_size, facts.accumulation, facts.shares or facts.ranks)
    return [
        facts.recipe,
        _row("strategy", f"{facts.strategy} on {ranks}, backend {facts.backend}"),
        _row("device", facts.device),
        _row("precision", facts.precision),
        _row("parameters", _parameters(facts)),
        _row("batch", batch.among(facts.ranks)),
        _row("steps", _length(facts)),
        _row("folder", _near(facts.folder)),
        *(_row("note", note) for note in facts.notes),
    ]


def _after_failure(report: SaveReport) -> str:
    if report.made_room:
        return "is saved again, with more room"
    return (
        f"the newest checkpoint is that of step {report.newest:,}"
        if report.newest is not None
        else "no checkpoint is there"
    )


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _parameters(facts: RunInfo) -> str:
    frozen = facts.parameters - facts.trainable
    return f"{facts.parameters:,}" + (f" ({facts.trainable:,} trained, {frozen:,} frozen)" if frozen else "")


def _length(facts: RunInfo) -> str:
    if facts.steps is None:
        return "as many as it takes"
    if not facts.epoch_samples:
        return f"{facts.steps:,}"
    return f"{facts.steps:,} ({facts.epoch_samples:,} samples an epoch)"


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "done:"
    return "stopped after" if isinstance(error, Stopped | KeyboardInterrupt) else "failed after"


def _amount(facts: RunInfo, last: StepReport | None) -> str:
    if last is None:
        return "0 steps"
    of = f" of {facts.steps:,}" if facts.steps is not None and last.step < facts.steps else ""
    tokens = f", {last.tokens:,} tokens" if last.tokens != last.samples else ""
    return f"{last.step:,}{of} steps, {last.samples:,} samples{tokens} in {formatting.duration(last.seconds)}"


def _found(report: EvaluationReport) -> str:
    return f"{formatting.metrics(report.metrics)} (step {report.step:,})"


def _near(folder: str) -> str:
    """Relative to the working directory, if that is shorter."""
    try:
        return min(os.path.relpath(folder), folder, key=len)
    except (OSError, ValueError):
        return folder


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _wrapped(text: str, width: int) -> str:
    """Each line broken between words, what follows set in below its row's text."""
    return "\n".join(
        "\n".join(textwrap.wrap(line, width - 1, subsequent_indent=" " * _indent(line), replace_whitespace=False))
        or line
        for line in text.split("\n")
    )


def _indent(line: str) -> int:
    return 14 if line.startswith("  ") else 4


def _silence(stream: TextIO) -> None:
    """Sends what is still buffered for a broken standard output nowhere: Python would fail at exit otherwise."""
    if stream is not sys.__stdout__:
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return
