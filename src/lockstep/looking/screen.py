"""The screen of `lockstep top`, drawn by rich: once, or every second in a terminal until q is pressed."""

from __future__ import annotations

import math
import os
import select
import statistics
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.core import formatting
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import plain_line
from lockstep.looking.states import RunState
from lockstep.looking.watched import WatchedRank, WatchedRun, watch
from lockstep.monitor.jsonl import as_number
from lockstep.monitor.live import progress_row

_REDRAWN_S = 1.0
_SPARKS, _ASCII_SPARKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_MOST_EVENTS = 5
_LINES_OF_OTHERS = 15  # on a screen: those that aren't about ranks
_COLUMNS: tuple[tuple[str, int, Callable[[WatchedRank], str]], ...] = (
    ("rank", 0, lambda rank: str(rank.rank)),
    ("host", 60, lambda rank: plain_line(rank.host)),
    ("step", 50, lambda rank: f"{rank.step:,.0f}" if math.isfinite(rank.step) else ""),
    ("phase", 50, lambda rank: plain_line(rank.phase)),
    ("for", 80, lambda rank: formatting.duration(rank.phase_seconds) if math.isfinite(rank.phase_seconds) else ""),
    ("mean", 0, lambda rank: _time(rank.seconds)),
    ("p95", 100, lambda rank: _time(rank.slowest)),
    ("memory", 70, lambda rank: formatting.size(rank.memory) if math.isfinite(rank.memory) else ""),
    ("", 0, lambda rank: _remark(rank)),
    ("GPU", 80, lambda rank: f"{rank.utilization:.0f} %" if math.isfinite(rank.utilization) else ""),
)
"""Columns of ranks: the head, the least width of the screen that shows it, the text."""


def show(run: Path) -> None:
    """Show a run until q is pressed, or input ends."""
    keys, console = sys.stdin.fileno(), Console(highlight=False)
    before = termios.tcgetattr(keys)

    def restore() -> None:
        with suppress(OSError, termios.error):  # the terminal is closed
            termios.tcsetattr(keys, termios.TCSADRAIN, before)

    with Live(console=console, screen=True, auto_refresh=False) as live, undo_on_stop(live.stop), undo_on_stop(restore):
        try:
            tty.setcbreak(keys)
            while True:
                live.update(Group(draw(watch(run), console), Text("q quits", style="dim")), refresh=True)
                if select.select([keys], [], [], _REDRAWN_S)[0] and os.read(keys, 100)[:1] in b"qQ\x03\x04":
                    return
        finally:
            restore()


def draw(run: WatchedRun, console: Console) -> RenderableType:
    """Return what fits a console; of many ranks, the worst."""
    parts = [*_head(run, console), Text()]
    most = max(1, console.height - _LINES_OF_OTHERS)
    if run.ranks:
        shown = sorted(run.ranks, key=lambda rank: rank.severity)[:most] if len(run.ranks) > most else run.ranks
        parts.append(_table(shown, console.width))
        if len(shown) < len(run.ranks):
            parts.append(_line(f"{len(shown)} of {len(run.ranks):,} ranks, the worst first", "dim"))
        parts.append(Text())
    return Group(*parts, *(_line(text, "dim") for text in run.events[-_MOST_EVENTS:]))


def _line(text: str, style: str = "") -> Text:
    return Text(plain_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(run: WatchedRun, console: Console) -> Iterator[RenderableType]:
    row = run.listed
    hosts = list(dict.fromkeys(rank.host for rank in run.ranks if rank.host)) or [row.host]
    place = f" on {hosts[0]}" if len(hosts) == 1 and hosts[0] else f" on {len(hosts)} hosts" * (len(hosts) > 1)
    ranks = f"  {formatting.counted(len(run.ranks), 'rank')}{place}" if run.ranks else ""
    is_fine = row.state.is_active or row.state in (RunState.DONE, RunState.STOPPED)
    name, space = plain_line(row.run), max(8, console.width - len(row.state.value) - len(ranks) - 2)
    name = name if len(name) <= space else f"…{name[len(name) - space + 1 :]}"
    yield _line(f"{name}  {row.state.value}{ranks}", "bold" if is_fine else "red")
    if row.note:
        yield _line(row.note, "" if row.state is RunState.STOPPED else "red")
    left = f"{formatting.clock(run.left)} left" if run.left is not None else ""
    yield progress_row(row.step or 0, row.steps, left)
    yield Text("  ".join(_figures(run)))
    signs = _SPARKS if "utf" in console.encoding else _ASCII_SPARKS
    if curve := sparkline(run.losses, max(8, min(60, console.width - 30)), signs):
        finite = [loss for loss in run.losses if math.isfinite(loss)]
        yield _line(f"loss {curve} {formatting.value(finite[0])} to {formatting.value(finite[-1])}", "green")
    if run.split:
        yield Text(
            "time " + "  ".join(f"{name} {100 * part:.0f} %" for name, part in run.split.items() if part >= 0.005)
        )


def _figures(run: WatchedRun) -> Iterator[str]:
    last, row = run.last, run.listed
    if row.loss is not None:
        yield f"loss {formatting.value(row.loss)}"
    if row.speed is not None:
        yield f"{formatting.short(row.speed)} {row.unit}/s"
    if means := [rank.seconds for rank in run.ranks if math.isfinite(rank.seconds)]:
        yield f"{_time(statistics.fmean(means))} a step"
    for name, label in (("grad_norm", "grad norm"), ("lr", "lr")):
        if math.isfinite(value := as_number(last.get(name))):
            yield f"{label} {formatting.value(value)}"
    if run.mfu is not None:
        yield f"MFU {100 * run.mfu:.0f} %"
    if row.goodput is not None:
        yield f"goodput {100 * row.goodput:.0f} %"
    if discarded := as_number(last.get("discarded"), 0.0):
        yield f"{discarded:,.0f} discarded"


def sparkline(values: Sequence[float], width: int, signs: str = _SPARKS) -> str:
    """Return medians of the values as a row of bars, `x` where one isn't finite; empty for less than two values."""
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


def _table(ranks: Sequence[WatchedRank], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown = [
        (name, text) for name, least, text in _COLUMNS if width >= least and (name == "rank" or any(map(text, ranks)))
    ]
    for name, _ in shown:
        table.add_column(name, justify="left" if name in ("host", "phase", "") else "right", no_wrap=True)
    for rank in ranks:
        table.add_row(*(Text(text(rank)) for _, text in shown), style="red" if _remark(rank) else "")
    return table


def _remark(rank: WatchedRank) -> str:
    return f"silent {formatting.duration(rank.silent)}" if rank.is_silent else plain_line(rank.straggler)


def _time(value: float) -> str:
    return formatting.short_time(value) if math.isfinite(value) else ""
