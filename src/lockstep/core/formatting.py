"""How figures read: the same number looks the same wherever a person meets it."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MAGNITUDES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(number: float) -> str:
    """Three digits and a magnitude: 12.3k, 1.23M, 640, 12.3, 0.25; a small int as it is."""
    if not math.isfinite(number):
        return str(number)
    for size, letter in _MAGNITUDES:
        if abs(number) >= 0.9995 * size:
            return _three_digits(number / size) + letter
    return str(number) if isinstance(number, int) else _three_digits(number)


def _three_digits(number: float) -> str:
    """Of a number below 1,000."""
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def value(number: float) -> str:
    """Four digits: 2.345, 0.01234, 1.23e-05."""
    if not math.isfinite(number) or 1e-3 <= abs(number) < 1e5 or number == 0:
        return f"{number:.4g}"
    return f"{number:.2e}"


def metric(name: str, number: float | None) -> str:
    """bits_per_byte 2.19, accuracy 97.2 %; None, as JSON has what isn't finite, is said so."""
    words = name.replace("_", " ")
    if number is None:
        return f"{words} not finite"
    if name.endswith("accuracy") and math.isfinite(number):
        return f"{words} {100 * number:.2f} %"
    return f"{words} {value(number)}"


def metrics(numbers: Mapping[str, float | None]) -> str:
    """The loss first."""
    names = sorted(numbers, key=lambda name: name != "loss")
    return ", ".join(metric(name, numbers[name]) for name in names)


def size(number: float) -> str:
    """Of bytes: 640 B, 12.3 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{_three_digits(number)} {unit}"
        number /= 1024
    return f"{_three_digits(number)} TiB"


def duration(seconds: float) -> str:
    """0.53 s, 12.3 s, 2 min 05 s, 1 h 02 min, 3 d 04 h."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def clock(seconds: float) -> str:
    """0:14, 12:05, 1:02:03, 3d 04:05."""
    whole = math.ceil(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}:{whole % 3600 // 60:02d}"
