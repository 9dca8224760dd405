"""The screen of `lockstep top` as lines: what doesn't fit is summarized, the worst first.

runs/a  running  2 ranks on vm  started 5 min 02 s ago
120/300 ━━━━━━━━━━━━━━━━━━━━━━━━━───────────────────────────────── 40 %  0:14 left
loss 2.345  24.5k tokens/s  grad norm 0.82  lr 9.8e-04
loss ▇▆▅▄▃▂▁▁▁
split  forward 30 %  backward 45 %  communication 20 %

rank  host  step  phase     for     mean     p95      memory
   1  vm     120  backward  0.01 s  0.05 s   0.07 s   1.2 GiB  1.7x backward

step 100: saved 5.37 MiB in 0.04 s
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.core import formatting
from lockstep.core.terminal import plain_line
from lockstep.looking.states import RunState, number
from lockstep.looking.watched import WatchedRank, WatchedRun
from lockstep.monitor.live import Status, rows

Style = Literal["", "bold", "dim", "alarm", "good"]
_SPARKS = " ▁▂▃▄▅▆▇█"
_ASCII_SPARKS = " .:-=+*#@"
_MOST_EVENTS = 5
_NARROW = 100  # columns below which a table has no column for the 95th percentile
_DISPENSABLE = ("phases", "GPU", "memory", "for", "host", "step")  # columns that a narrower table lacks, in this order


@dataclass(frozen=True, slots=True)
class ScreenLine:
    """A line, at most as wide as the screen, and how it looks."""

    text: str
    style: Style = ""


def draw(run: WatchedRun, width: int, height: int, *, unicode: bool = True) -> list[ScreenLine]:
    """Return at most `height` lines of at most `width` columns."""
    head = _head(run, width, unicode)
    events = [ScreenLine(plain_line(text), "dim") for text in run.events[-_MOST_EVENTS:]]
    space = height - len(head) - 1
    shown = events[-max(0, min(len(events), space // 3)) :] if space >= 6 else []
    below = [ScreenLine(""), *shown] if shown else []
    table = _ranks(run.ranks, width, space - len(below))
    lines = [*head, *([ScreenLine("")] if table else []), *table, *below]
    return [ScreenLine(_cut(line.text, width, unicode), line.style) for line in lines[:height]]


def _cut(text: str, width: int, unicode: bool) -> str:
    """Return a line that fits. One that is cut ends with an ellipsis: a part of a number would be another number."""
    mark = "…" if unicode else "..."
    return text if len(text) <= width else f"{text[: max(0, width - len(mark))]}{mark}"[:width]


def _head(run: WatchedRun, width: int, unicode: bool) -> list[ScreenLine]:
    row = run.listed
    hosts = list(dict.fromkeys(rank.host for rank in run.ranks if rank.host)) or [row.host]
    place = f" on {hosts[0]}" if len(hosts) == 1 and hosts[0] else f" on {len(hosts)} hosts" * (len(hosts) > 1)
    ranks = f"{len(run.ranks):,} rank{'s' * (len(run.ranks) != 1)}{place}" if run.ranks else ""
    style: Style = "bold" if row.state.is_active or row.state in (RunState.DONE, RunState.STOPPED) else "alarm"
    state = "".join(f"  {text}" for text in (row.state.value, plain_line(ranks)) if text)
    name, space = plain_line(row.run), max(8, width - len(state))
    lines = [ScreenLine((name if len(name) <= space else f"…{name[len(name) - space + 1 :]}") + state, style)]
    if row.note:
        lines.append(ScreenLine(plain_line(row.note), "alarm" if row.state is not RunState.STOPPED else ""))
    if run.damaged:
        lines.append(ScreenLine(run.damaged, "alarm"))
    left = f"{formatting.clock(run.left)} left" if run.left is not None else ""
    steps = row.steps
    if steps is None and row.step is not None and row.share:
        steps = max(row.step, round(row.step / row.share))
    bar = rows(Status(row.step or 0, steps, left, _figures(run)), width, "━─" if unicode else "=-")
    lines.append(ScreenLine(bar.head + bar.bar_done + bar.bar_left + bar.tail))
    if bar.parts:
        lines.append(ScreenLine(bar.parts))
    if curve := sparkline(run.losses, max(8, min(60, width - 30)), _SPARKS if unicode else _ASCII_SPARKS):
        finite = [loss for loss in run.losses if math.isfinite(loss)]
        lines.append(
            ScreenLine(f"loss {curve} {formatting.value(finite[0])} to {formatting.value(finite[-1])}", "good")
        )
    if run.split:
        split = sorted(run.split.items(), key=lambda item: -item[1]) if width < _NARROW else run.split.items()
        parts = [f"{name} {100 * share:.0f} %" for name, share in split if share >= 0.005]
        while len(parts) > 1 and len("time " + "  ".join(parts)) > width:
            parts.pop()
        lines.append(ScreenLine("time " + "  ".join(parts)))
    return lines


def _figures(run: WatchedRun) -> tuple[str, ...]:
    last, row = run.last, run.listed
    parts = [] if row.loss is None else [f"loss {formatting.value(row.loss)}"]
    if row.speed is not None:
        parts.append(f"{formatting.short(row.speed)} {row.unit}/s")
    means = [rank.seconds for rank in run.ranks if math.isfinite(rank.seconds)]
    if means:
        parts.append(f"{_milliseconds(statistics.fmean(means))} a step")
    for name, label in (("grad_norm", "grad norm"), ("lr", "lr")):
        if math.isfinite(value := number(last.get(name))):
            parts.append(f"{label} {formatting.value(value)}")
    if run.mfu is not None:
        parts.append(f"MFU {100 * run.mfu:.0f} %")
    if row.goodput is not None:
        parts.append(f"goodput {100 * row.goodput:.0f} %")
    if discarded := number(last.get("discarded"), 0.0):
        parts.append(f"{discarded:,.0f} discarded")
    return tuple(parts)


def sparkline(values: Sequence[float], width: int, signs: str = _SPARKS) -> str:
    """Return medians of the values as a row of bars, `x` where one isn't finite; empty if there are fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    columns = min(width, len(values))
    groups = [values[len(values) * n // columns : len(values) * (n + 1) // columns] for n in range(columns)]
    medians = [statistics.median(group) if all(map(math.isfinite, group)) else math.nan for group in groups]
    known = [value for value in medians if math.isfinite(value)] or finite
    low, high = min(known), max(known)
    scale = (len(signs) - 2) / (high - low) if high > low else 0.0
    return "".join("x" if math.isnan(value) else signs[1 + round((value - low) * scale)] for value in medians)


# --- ranks ----------------------------------------------------------------------------------------------------------

_Column = tuple[str, Callable[[WatchedRank], str]]


def _ranks(ranks: Sequence[WatchedRank], width: int, height: int) -> list[ScreenLine]:
    """Return a table of all ranks or, if they don't fit, of their hosts and the worst ranks."""
    if not ranks or height < 3:
        return []
    if len(ranks) + 1 <= height:
        return _rank_table(ranks, width)
    hosts = _host_table(ranks, width, height // 2 - 1)
    worst = sorted(ranks, key=lambda rank: rank.severity)[: max(1, height - len(hosts) - 3)]
    more = ScreenLine(f"{len(worst)} of {len(ranks):,} ranks, the worst first", "dim")
    gap = [ScreenLine("")] if hosts else []
    return [*hosts, *gap, *_rank_table(worst, width), more][:height]


def _rank_table(ranks: Sequence[WatchedRank], width: int) -> list[ScreenLine]:
    columns: list[_Column] = [
        ("rank", lambda rank: str(rank.rank)),
        ("host", lambda rank: plain_line(rank.host)[:20]),
        ("step", lambda rank: f"{rank.step:,.0f}" if math.isfinite(rank.step) else ""),
        ("phase", lambda rank: plain_line(rank.phase)),
        ("for", lambda rank: _seconds(rank.phase_seconds)),
        ("mean", lambda rank: _milliseconds(rank.seconds)),
        ("p95", lambda rank: _milliseconds(rank.slowest) if width >= _NARROW else ""),
        ("memory", lambda rank: formatting.size(rank.memory) if math.isfinite(rank.memory) else ""),
        ("", _remark),
        ("GPU", lambda rank: f"{rank.utilization:.0f} %" if math.isfinite(rank.utilization) else ""),
    ]
    cells = [[name for name, _ in columns], *([text(rank) for _, text in columns] for rank in ranks)]
    lines = _aligned(cells, width, left=("host", "phase", ""))
    styles: list[Style] = ["dim", *(_style(rank) for rank in ranks)]
    return [ScreenLine(line, style) for line, style in zip(lines, styles, strict=True)]


def _host_table(ranks: Sequence[WatchedRank], width: int, height: int) -> list[ScreenLine]:
    by_host: dict[str, list[WatchedRank]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank)
    if len(by_host) < 2 or height < 3:
        return []
    ordered = sorted(by_host.items(), key=lambda item: min(rank.severity for rank in item[1]))
    shown = ordered if len(ordered) <= height - 1 else ordered[: height - 2]
    cells = [["host", "ranks", "step", "mean", "memory", "", "phases"]]
    styles: list[Style] = ["dim"]
    for host, of_host in shown:
        steps = [rank.step for rank in of_host if math.isfinite(rank.step)]
        means = [rank.seconds for rank in of_host if math.isfinite(rank.seconds)]
        memory = [rank.memory for rank in of_host if math.isfinite(rank.memory)]
        phases = Counter(rank.phase for rank in of_host if rank.phase).most_common(3 if width >= _NARROW else 1)
        silent = sum(rank.is_silent for rank in of_host)
        slow = sum(bool(rank.straggler) for rank in of_host)
        remarks = [f"{silent} silent"] * bool(silent) + [f"{slow} straggler{'s' * (slow > 1)}"] * bool(slow)
        cells.append(
            [
                plain_line(host)[:24],
                str(len(of_host)),
                f"{min(steps):,.0f}" if steps else "",
                _milliseconds(statistics.fmean(means)) if means else "",
                formatting.size(max(memory)) if memory else "",
                ", ".join(remarks),
                ", ".join(f"{number} {plain_line(phase)}" for phase, number in phases),
            ]
        )
        styles.append("alarm" if remarks else "")
    lines = _aligned(cells, width, left=("host", "phases", ""))
    table = [ScreenLine(line, style) for line, style in zip(lines, styles, strict=True)]
    if len(shown) < len(ordered):
        table.append(ScreenLine(f"{len(shown)} of {len(ordered):,} hosts, the worst first", "dim"))
    return table


def _aligned(cells: list[list[str]], width: int, left: Sequence[str]) -> list[str]:
    """Return rows, the head first, without columns that are empty or don't fit."""
    head = cells[0]
    columns = [n for n in range(len(head)) if any(row[n] for row in cells[1:])]
    widths = {n: max(len(row[n]) for row in cells) for n in columns}
    for name in _DISPENSABLE:
        if sum(widths.values()) + 2 * (len(widths) - 1) > width and name in head:
            widths.pop(head.index(name), None)
    columns = [n for n in columns if n in widths]
    return [
        "  ".join(row[n].ljust(widths[n]) if head[n] in left else row[n].rjust(widths[n]) for n in columns).rstrip()
        for row in cells
    ]


def _remark(rank: WatchedRank) -> str:
    if rank.is_silent:
        return f"silent {formatting.duration(rank.silent)}"
    return plain_line(rank.straggler)


def _style(rank: WatchedRank) -> Style:
    return "alarm" if rank.is_silent or rank.straggler else ""


def _seconds(value: float) -> str:
    return formatting.duration(value) if math.isfinite(value) else ""


def _milliseconds(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{1000 * value:.3g} ms" if value < 0.9995 else formatting.duration(value)
