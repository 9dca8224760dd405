"""Reads what a run wrote, however much of it is there: `flaws` says what is missing or damaged."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from lockstep.config.reading import MOST_BYTES, read_yaml, to_python
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.formatting import counted, listed
from lockstep.monitor.attempts import Attempt, read_attempts
from lockstep.monitor.events import EVENTS, passed_discards
from lockstep.monitor.folder import CONFIG, EARLIER, ENVIRONMENT, METRICS, SUMMARY
from lockstep.monitor.goodput import step_reached
from lockstep.monitor.jsonl import as_number, parsed
from lockstep.report.series import Series

Json: TypeAlias = Mapping[str, Any]

COLUMNS = ("loss", "grad_norm", "lr", "loss_scale", "samples_per_second", "tokens_per_second")
_NOT_METRICS = ("evaluation", "step", "samples", "seconds", "not_finite")
_LARGEST_STEP = 2**53  # beyond, floats skip whole numbers
_MOST_SAMPLES = 12  # of a bad update
_LONGEST_TEXT = 4000
_LONGEST_LINE = 2**20  # characters; of a longer line each part counts as damaged
_values_of = itemgetter(*COLUMNS)


@dataclass(frozen=True, slots=True)
class Save:
    """A save; a number that its line lacks is 0."""

    step: int
    size: float
    seconds: float
    lost: float
    failure: str | None


@dataclass(frozen=True, slots=True)
class Text:
    """A text that user code, or the run itself, logged, perhaps cut."""

    step: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class LoggedFile:
    """An image or a table that user code logged; `file` is relative to the run's folder."""

    step: int
    name: str
    file: str


@dataclass(slots=True)
class RunData:
    """A run's folder, read. Missing or unreadable parts are empty.

    Attributes:
        summary: None while the run isn't finished.
        columns: Of metrics.jsonl, by `COLUMNS`.
        last: The last line of metrics.jsonl.
        reached: The last step that is known to have been made; 0: none.
        discarded: Step and verdict of each discarded update.
        evaluations: By set, then metric, then step.
        logged: Numbers that user code logged, by name, then step.
        restarts: Step that was resumed from, and ranks (0: unknown).
        rollbacks: First and last step of the updates that a restart discarded.
        left_out: Reason by index of each sample that could not be used.
        bad_numbers: Update, and a clause about it.
        earlier: Number of attempts with files in `earlier`.
        flaws: What could not be read, a sentence each.
    """

    folder: Path
    config_text: str = ""
    config: Json = field(default_factory=dict)
    environment: Json = field(default_factory=dict)
    summary: Json | None = None
    columns: dict[str, Series] = field(default_factory=dict)
    last: Json = field(default_factory=dict)
    reached: int = 0
    discarded: list[tuple[int, str]] = field(default_factory=list)
    evaluations: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    logged: dict[str, dict[int, float]] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    images: list[LoggedFile] = field(default_factory=list)
    tables: list[LoggedFile] = field(default_factory=list)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    bad_numbers: list[tuple[int, str]] = field(default_factory=list)
    earlier: int = 0
    attempts: tuple[Attempt, ...] = ()
    flaws: list[str] = field(default_factory=list)

    @property
    def trained_loss(self) -> Series:
        """The loss without discarded updates, unless many of them in a row end the run."""
        loss = self.columns["loss"]
        gone = passed_discards([step for step, _ in self.discarded], int(loss.steps[-1]) if len(loss.steps) else 0)
        stays = ~np.isin(loss.steps, list(gone))
        return replace(loss, steps=loss.steps[stays], values=loss.values[stays])

    @property
    def num_attempts(self) -> int:
        return max(len(self.attempts), len(self.restarts) + 1)

    def configured(self, section: str, key: str) -> object:
        values = self.config.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


def read_run(folder: Path) -> RunData:
    """Read a run's folder. Raises OSError for a file that is there and can't be read."""
    run = RunData(folder)
    _read_config(run)
    run.environment = _object(run, ENVIRONMENT) or {}
    run.summary = _object(run, SUMMARY)
    _read_updates(run)
    for step, record in _records(run, EVENTS):
        _take_event(run, step, record)
    run.reached = step_reached(folder)
    run.attempts = read_attempts(folder)
    run.rollbacks = _rollbacks(run)
    run.earlier = sum(entry.name.isdecimal() for entry in (folder / EARLIER).glob("*"))
    return run


def _rollbacks(run: RunData) -> list[tuple[int, int]]:
    """Return the steps with lines that moved to earlier/N when the run resumed from the step before them."""
    starts = {step for step, _ in run.restarts}
    rollbacks = []
    for folder in sorted((run.folder / EARLIER).glob("*")):
        records = [step for step, _ in _records(RunData(folder), METRICS)] if folder.name.isdecimal() else []
        before = max((start for start in starts if records and start < min(records)), default=None)
        if before is not None:
            rollbacks.append((before, max(records)))
    return sorted(rollbacks)


def _text(file: Path) -> str | None:
    try:
        return read_bounded(file, MAX_JSON_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _read_config(run: RunData) -> None:
    text = _text(run.folder / CONFIG)
    if text is None:
        run.flaws.append(f"{CONFIG} is missing.")
        return
    run.config_text = text
    tree = read_yaml(text, CONFIG)[0] if len(text) <= MOST_BYTES else None
    if tree is None or not tree.entries:
        run.flaws.append(f"{CONFIG} is damaged; it is shown as it is.")
        return
    run.config = cast("Json", to_python(tree))


def _object(run: RunData, name: str) -> Json | None:
    text = _text(run.folder / name)
    if text is None:
        return None
    content = parsed(text)
    if content is None:
        run.flaws.append(f"{name} is damaged and left out.")
    return content or {}


def _records(run: RunData, name: str) -> Iterator[tuple[int, Json]]:
    """Yield step and object of each line that has both."""
    damaged: list[int] = []
    try:
        lines = (run.folder / name).open(encoding="utf-8", errors="replace", newline="\n")
    except FileNotFoundError:
        return
    with lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE), ""), 1):
            record = parsed(line)
            step = _step(record.get("step")) if record is not None else None
            if record is not None and step is not None:
                yield step, record
            elif line.endswith("\n"):  # the last one may be on its way
                damaged.append(number)
    if damaged:
        run.flaws.append(f"{counted(len(damaged), 'line')} of {name} can't be read, from line {damaged[0]:,} on.")


def _read_updates(run: RunData) -> None:
    rows, empty = array("d"), []
    for step, record in _records(run, METRICS):
        run.last = record
        if record.get("count") == 0:
            empty.append(step)
        rows.append(step)
        try:
            rows.extend(array("d", _values_of(record)))  # as nearly all of a million lines
        except (KeyError, TypeError, OverflowError):  # one is missing, null, or no number
            rows.extend(as_number(record.get(name)) for name in COLUMNS)
        if record.get("kept") is False:
            run.discarded.append((step, _name(record.get("verdict"))))
    steps, *columns = np.frombuffer(rows).reshape(-1, 1 + len(COLUMNS)).T
    run.columns = {name: Series.of(name, steps, column) for name, column in zip(COLUMNS, columns, strict=True)}
    for name in ("loss", "grad_norm") if empty else ():  # an update without a sample has neither
        series = run.columns[name]
        has_samples = ~np.isin(series.steps, empty)
        run.columns[name] = replace(series, steps=series.steps[has_samples], values=series.values[has_samples])


def _take_event(run: RunData, step: int, record: Json) -> None:
    if "evaluation" in record:
        metrics = run.evaluations.setdefault(_name(record["evaluation"]), {})
        for name, value in record.items():
            if name not in _NOT_METRICS and is_number(value):
                metrics.setdefault(name.removeprefix("metric."), {})[step] = as_number(value)
    elif "resumed" in record:
        run.restarts.append((step, _step(record.get("ranks")) or 0))
    elif "bad_numbers" in record:
        run.bad_numbers.append((_step(record.get("update")) or step, _bad_numbers(record)))
    elif (index := _step(record.get("left_out"))) is not None:
        run.left_out[index] = _name(record.get("reason"))[:_LONGEST_TEXT]
    elif "saved" in record:
        names = ("bytes", "seconds", "lost_seconds")
        size, seconds, lost = (max(0.0, as_number(record.get(name), 0.0)) for name in names)
        failure = record.get("failure")
        run.saves.append(Save(step, size, seconds, lost, None if failure is None else _name(failure)))
    elif isinstance(logged := record.get("logged"), dict):
        for name, value in logged.items():
            if isinstance(value, str):
                text = value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "…"
                run.texts.append(Text(step, name, text))
            elif isinstance(value, dict):
                if isinstance(file := value.get("file"), str):
                    (run.images if file.endswith(".png") else run.tables).append(LoggedFile(step, name, file))
            elif is_number(value):
                run.logged.setdefault(name, {})[step] = as_number(value)


def _samples(value: object) -> list[int]:
    return [sample for sample in value if _step(sample) is not None] if isinstance(value, list) else []


def _bad_numbers(record: Json) -> str:
    samples = _samples(record.get("samples"))
    named = f"samples {listed([*map(str, samples)], _MOST_SAMPLES)}" if samples else ""
    parts = (_name(record.get("what")), _name(record.get("where")), named)
    what = "; ".join(part for part in parts if part)[:_LONGEST_TEXT]
    return f"{what}: {_name(record['bad_numbers'])}"


def _step(value: object) -> int | None:
    is_step = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP
    return cast("int", value) if is_step else None


def _name(value: object) -> str:
    return value if isinstance(value, str) else "(no name)"


def is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
