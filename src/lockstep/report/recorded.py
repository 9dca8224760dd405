"""What a run wrote, read again, however much of it is there.

    config.yaml  environment.json  summary.json  metrics.jsonl  events.jsonl   -->  Recorded, and what is wrong with it

A file may be missing, empty, cut short by a kill or damaged: what can be read is read, and `flaws` says the rest.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from lockstep.config.reading import MOST_BYTES, read_yaml, to_python
from lockstep.core.bounded_files import MOST_JSON, read_bounded
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import CONFIG, EARLIER, ENVIRONMENT, METRICS, SUMMARY
from lockstep.report.series import Series

Json: TypeAlias = Mapping[str, Any]

COLUMNS = ("loss", "grad_norm", "lr", "loss_scale", "samples_per_second", "tokens_per_second")
_NOT_METRICS = ("evaluation", "step", "samples", "seconds", "not_finite")
_LARGEST_STEP = 2**53  # beyond, floats skip whole numbers
_LONGEST_TEXT = 4000
_decode = json.JSONDecoder().raw_decode
_columns_of = itemgetter(*COLUMNS)


@dataclass(frozen=True, slots=True)
class Updates:
    """What metrics.jsonl has.

    Attributes:
        columns: by `COLUMNS`.
        last: the last line, empty if there is none.
        discarded: step and verdict of each update that wasn't kept.
    """

    columns: Mapping[str, Series]
    last: Json
    discarded: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """One line about a save; what it doesn't say is 0."""

    step: int
    size: float
    seconds: float
    lost: float
    failure: str | None


@dataclass(frozen=True, slots=True)
class Text:
    """What user code, or the run itself, logged as a text; cut where it is very long."""

    step: int
    name: str
    text: str


@dataclass(slots=True)
class Events:
    """What events.jsonl has.

    Attributes:
        evaluations: by set, then metric, then step.
        values: numbers that user code logged, by name, then step.
        restarts: step that was gone on from, and ranks (0: unknown).
    """

    evaluations: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run's folder, read.

    Attributes:
        config_text: config.yaml as it is; empty if it is missing.
        config: what it says; empty where it can't be read.
        summary: None while the run isn't finished; empty if it can't be read.
        put_aside: attempts whose traces were put into `earlier`.
        flaws: what could not be read, a sentence each.
    """

    folder: Path
    config_text: str
    config: Json
    environment: Json
    summary: Json | None
    updates: Updates
    events: Events
    put_aside: int
    flaws: tuple[str, ...]

    def asked(self, section: str, key: str) -> object:
        """A value of the config; None if there is none."""
        found = self.config.get(section)
        return found.get(key) if isinstance(found, Mapping) else None


def read(folder: Path) -> Recorded:
    """Raises OSError if a file is there and the system won't read it."""
    flaws: list[str] = []
    config_text = _text(folder / CONFIG)
    return Recorded(
        folder,
        config_text or "",
        _config(config_text, flaws),
        _object(folder / ENVIRONMENT, flaws) or {},
        _object(folder / SUMMARY, flaws),
        _updates(folder / METRICS, flaws),
        _events(folder / EVENTS, flaws),
        sum(entry.name.isdecimal() for entry in (folder / EARLIER).glob("*")),
        tuple(flaws),
    )


# --- whole files ----------------------------------------------------------------------------------------------------


def _text(file: Path) -> str | None:
    try:
        return read_bounded(file, MOST_JSON).decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _object(file: Path, flaws: list[str]) -> Json | None:
    text = _text(file)
    if text is None:
        return None
    found = _parsed(text)
    if found is None:
        flaws.append(f"{file.name} is damaged and left out.")
    return found or {}


def _config(text: str | None, flaws: list[str]) -> Json:
    if text is None:
        flaws.append(f"{CONFIG} is missing.")
        return {}
    tree = read_yaml(text, CONFIG)[0] if len(text) <= MOST_BYTES else None
    if tree is None or not tree.entries:
        flaws.append(f"{CONFIG} is damaged; it is shown as it is.")
        return {}
    return cast("Json", to_python(tree))


def _parsed(text: str) -> Json | None:
    text = text.strip()
    try:
        found, end = _decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and end == len(text) else None


# --- lines ----------------------------------------------------------------------------------------------------------

_LONGEST_LINE = 2**20  # characters; of a longer one each part counts as damaged


def _records(file: Path, flaws: list[str]) -> Iterator[tuple[int, Json]]:
    """Step and object of each line that has both."""
    damaged: list[int] = []
    cut_short = False
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE), ""), 1):
            record = _parsed(line)
            step = _step(record.get("step")) if record is not None else None
            if record is not None and step is not None:
                yield step, record
            elif line.endswith("\n"):
                damaged.append(number)
            else:
                cut_short = True
    if cut_short:
        flaws.append(
            f"The last line of {file.name} is not whole, as a kill or a run under way leaves it; it is left out."
        )
    if damaged:
        flaws.append(_damaged(file.name, damaged))


def _damaged(name: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"Line {numbers[0]:,} of {name} can't be read; it is left out."
    return f"{len(numbers):,} lines of {name} can't be read, the first of them line {numbers[0]:,}; they are left out."


def _updates(file: Path, flaws: list[str]) -> Updates:
    rows = array("d")
    discarded = []
    last: Json = {}
    try:
        for step, last in _records(file, flaws):
            rows.append(step)
            rows.extend(_row(last))
            if last.get("kept") is False:
                discarded.append((step, _name(last.get("verdict"))))
    except FileNotFoundError:
        pass
    steps, *columns = np.frombuffer(rows).reshape(-1, 1 + len(COLUMNS)).T
    series = {name: Series.of(name, steps, column) for name, column in zip(COLUMNS, columns, strict=True)}
    return Updates(series, last, tuple(discarded))


def _row(record: Json) -> array[float]:
    """By `COLUMNS`; of a million lines nearly all take the first way."""
    try:
        return array("d", _columns_of(record))
    except (KeyError, TypeError, OverflowError):  # one is missing, null, or no number
        return array("d", [_number(record.get(name)) for name in COLUMNS])


def _events(file: Path, flaws: list[str]) -> Events:
    events = Events()
    try:
        for step, record in _records(file, flaws):
            _take(events, step, record)
    except FileNotFoundError:
        pass
    return events


def _take(events: Events, step: int, record: Json) -> None:
    if "evaluation" in record:
        metrics = events.evaluations.setdefault(_name(record["evaluation"]), {})
        for name, value in record.items():
            if name not in _NOT_METRICS and _is_number(value):
                metrics.setdefault(name.removeprefix("metric."), {})[step] = _number(value)
    elif "resumed" in record:
        events.restarts.append((step, _step(record.get("ranks")) or 0))
    elif "saved" in record:
        events.saves.append(_save(step, record))
    elif isinstance(record.get("logged"), dict):
        _take_logged(events, step, record["logged"])


def _save(step: int, record: Json) -> Save:
    size, seconds, lost = (_amount(record.get(name)) for name in ("bytes", "seconds", "lost_seconds"))
    failure = record.get("failure")
    return Save(step, size, seconds, lost, None if failure is None else _name(failure))


def _take_logged(events: Events, step: int, logged: Json) -> None:
    for name, value in logged.items():
        if isinstance(value, str):
            events.texts.append(Text(step, name, value[:_LONGEST_TEXT] + ("…" if value[_LONGEST_TEXT:] else "")))
        elif _is_number(value):
            events.values.setdefault(name, {})[step] = _number(value)


# --- values ---------------------------------------------------------------------------------------------------------


def _step(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < _LARGEST_STEP else None


def _name(value: object) -> str:
    return value if isinstance(value, str) else "(no name)"


def _is_number(value: object) -> bool:
    """null stands for a number that wasn't finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: object) -> float:
    """NaN for whatever is none."""
    if isinstance(value, float):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _amount(value: object) -> float:
    number = _number(value)
    return number if number >= 0 and math.isfinite(number) else 0.0
