"""Formats numbers, byte counts, durations and nested values for people."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_SENTENCE_END = re.compile(r"(?<!\.)\.(?=\s+[A-Z]|\s*$)")
_MAGNITUDES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def listed(words: Sequence[str], most: int) -> str:
    """Return the first words, and the number of the others."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def counted(number: int, word: str) -> str:
    """Return a number and a word: 1 step, 2,000 steps."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table; columns in `left` are flush left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        (
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their dotted keys; also empty mappings."""
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from flat(part, f"{key}.{name}" if key else str(name))


def differing(then: Any, now: Any) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between nested mappings, by dotted key; None where there is none."""
    before, after = ({key: part for key, part in flat(value) if part != {}} for value in (then, now))
    pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def first_sentence(text: str) -> str:
    """Return the first sentence of a message without its point."""
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def short(number: float) -> str:
    """Return three digits and a magnitude: 12.3k, 1.23M, 640, 0.25."""
    if not math.isfinite(number):
        return str(number)
    if abs(number) >= 0.9995e15:
        return value(number)
    for size, letter in _MAGNITUDES:
        if abs(number) >= 0.9995 * size:
            return _three_digits(number / size) + letter
    return str(number) if isinstance(number, int) else _three_digits(number)


def value(number: float) -> str:
    """Return four digits: 2.345, 0.01234, 1.23e-05."""
    if not math.isfinite(number) or 1e-3 <= abs(number) < 1e5 or number == 0:
        return f"{number:.4g}"
    return f"{number:.2e}"


def metric(name: str, number: float | None) -> str:
    """Return a metric's name and value: accuracy 97.2 %. None stands for NaN and infinity."""
    words = name.replace("_", " ")
    if number is None:
        return f"{words} not finite"
    if name.endswith("accuracy") and math.isfinite(number):
        return f"{words} {100 * number:.2f} %"
    return f"{words} {value(number)}"


def metrics(numbers: Mapping[str, float | None]) -> str:
    """Return all metrics in one line, the loss first."""
    names = sorted(numbers, key=lambda name: name != "loss")
    return ", ".join(metric(name, numbers[name]) for name in names)


def size(number: float) -> str:
    """Return a number of bytes: 640 B, 12.3 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{_three_digits(number)} {unit}"
        number /= 1024
    return f"{_three_digits(number)} TiB"


def duration(seconds: float) -> str:
    """Return a duration: 0.53 s, 2 min 05 s, 1 h 02 min, 3 d 04 h."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    days, hours, minutes, rest = _time_units(round(seconds))
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def short_time(seconds: float) -> str:
    """Return a time: 1.20 s, 3.4 ms, 5.6 us."""
    if seconds >= 1:
        return duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: 0:14, 1:02:03, 3d 04:05."""
    days, hours, minutes, rest = _time_units(math.ceil(seconds))
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _time_units(seconds: int) -> tuple[int, int, int, int]:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return *divmod(hours, 24), minutes, seconds


def _three_digits(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
