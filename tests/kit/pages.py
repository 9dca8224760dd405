"""Runs' folders as runs write them, without training, and the pages about them as a program reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from kit.reports import FACTS, report
from lockstep.core.progress import Progress
from lockstep.core.records import EvaluationReport, SaveReport
from lockstep.monitor import environment, folder
from lockstep.monitor.events import EventLog, summarize
from lockstep.monitor.folder import ENVIRONMENT, METRICS, SUMMARY, RunFolder
from lockstep.monitor.metric_log import Logged
from lockstep.report import write_report

CONFIG = "description: Learns to read\noptim:\n  lr: 0.0003\nrun:\n  steps: 30\n"
Happening = Callable[[EventLog], object]


def make_run(
    where: Path,
    *,
    steps: int = 30,
    finished: bool = True,
    happenings: dict[int, Iterable[Happening]] | None = None,
    **changes: object,
) -> Path:
    """Write a run's folder with the classes that a run uses; `changes` are those of every report."""
    run = RunFolder.create(where / "run", again=True)
    run.write(folder.CONFIG, CONFIG)
    run.write(ENVIRONMENT, environment.describe())
    log = EventLog(run.path / METRICS, every=1)
    log.start(FACTS)
    for step in range(1, steps + 1):
        log.see(report(step, **changes))
        for happening in (happenings or {}).get(step, ()):
            happening(log)
    log.finish(None)
    if finished:
        progress = Progress(steps, 64 * steps, 64 * 256 * steps)
        run.write(SUMMARY, summarize(FACTS, progress, report(steps), [], 3.25))
    run.release()
    return run.path


def evaluated(name: str, step: int, **metrics: float) -> Happening:
    return lambda log: log.evaluated(EvaluationReport(name, step, metrics, 512, 0.5))


def saved(step: int, failure: str | None = None) -> Happening:
    return lambda log: log.saved(SaveReport(step, 2**20, 0.2, 0.01, failure))


def resumed(step: int, ranks: int) -> Happening:
    return lambda log: log.start(replace(FACTS, resumed_from=step, ranks=ranks))


def logged(step: int, **texts: str) -> Happening:
    return lambda log: log.logged(step, Logged(texts=texts))


class Page(HTMLParser):
    """The elements of a page, and its text without scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def charts(self) -> list[str]:
        """Titles of the charts, with what they state."""
        return [str(attributes["aria-label"]) for tag, attributes in self.elements if attributes.get("role") == "img"]

    def count(self, class_: str) -> int:
        return sum(class_ in str(attributes.get("class") or "").split() for _, attributes in self.elements)


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def interval(
    step: int, ranks: int = 2, slow: int | None = None, seconds: float = 10.0, **split: float
) -> dict[str, Any]:
    """A line of ranks.jsonl; rank `slow` computes twice as long, and the others wait for it."""
    parts = {
        "host": 0.0002,
        "data": 0.001,
        "forward": 0.015,
        "backward": 0.03,
        "optimizer": 0.002,
        "save": 0.0,
        **split,
    }
    columns = {
        name: [value * (2 if rank == slow and name == "backward" else 1) for rank in range(ranks)]
        for name, value in parts.items()
    }
    columns["communication"] = [0.003 + (parts["backward"] if slow not in (None, rank) else 0) for rank in range(ranks)]
    whole = [sum(column[rank] for column in columns.values()) for rank in range(ranks)]
    return {
        "step": step,
        "time": 1.79e9 + step,
        "seconds": seconds,
        "ranks": list(range(ranks)),
        "hosts": ["a"],
        "updates": [10] * ranks,
        "step_seconds": whole,
        "median": whole,
        "slowest": whole,
        "deviation": [0.0] * ranks,
        "split": columns,
        "gauges": {
            "memory_resident": [2.0**28 * (1 + rank / 64) for rank in range(ranks)],
            "utilization": [90.0 - rank / 8 for rank in range(ranks)],
        },
        "stragglers": [] if slow is None else [{"rank": slow, "host": "a", "ratio": 1.6, "phase": "backward"}],
    }


def write_intervals(run: Path, lines: Iterable[dict[str, Any]]) -> None:
    (run / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
