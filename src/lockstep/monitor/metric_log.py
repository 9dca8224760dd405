"""What a user's objective or loop logs, kept on its rank until the log is due.

    from lockstep.monitor import metric_log as log

    log.mean("accuracy", right.sum(), right.numel())     sum and weight: summed over micro-batches and ranks
    log.scalar("temperature", t)                         the last value; mean over ranks
    log.histogram("logits", logits)                      counts in fixed bins; summed over micro-batches and ranks
    log.text("sample", "def ...")                        the last text; of the first rank that logged it

    on every rank   MetricLog.drain() -> LogEntries  --gather-->  merge([...]) -> Logged   -> the watchers

Outside of a run nothing is kept. Values are detached at once; a GPU's tensors are read when the log is drained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bins that are the same on every rank, so that counts can be summed without a word beforehand: eight a decade of
# magnitude from 1e-12 to 1e12, both signs. Bin i holds EDGES[i-1] < x <= EDGES[i]; the first and last are open.
_MAGNITUDES = tuple(10 ** (power / 8) for power in range(-96, 97))
EDGES: tuple[float, ...] = (*(-edge for edge in reversed(_MAGNITUDES)), 0.0, *_MAGNITUDES)
LONGEST_TEXT = 65536


@dataclass(frozen=True, slots=True)
class Histogram:
    """Attributes:
    counts: by bin of `EDGES`, empty bins left out.
    low, high: smallest and largest finite value; NaN if there is none.
    total, squares: sum of the finite values and of their squares.
    not_finite: how many NaNs and infinities there were beside.
    """

    counts: Mapping[int, int]
    low: float
    high: float
    total: float
    squares: float
    not_finite: int = 0

    @property
    def count(self) -> int:
        """Finite values."""
        return sum(self.counts.values())

    def bins(self) -> list[tuple[float, float, int]]:
        """(low, high, count) of the bins that aren't empty, in order, cut to the range of the values."""
        return [(*self._range(index), self.counts[index]) for index in sorted(self.counts)]

    def _range(self, index: int) -> tuple[float, float]:
        low = EDGES[index - 1] if index else self.low
        high = EDGES[index] if index < len(EDGES) else self.high
        return max(low, self.low), min(high, self.high)


@dataclass(frozen=True, slots=True)
class LogEntries:
    """What one rank logged since the last time. Small, and made of plain numbers: it can be pickled."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.scalars or self.means or self.histograms or self.texts)


@dataclass(frozen=True, slots=True)
class Logged:
    """What all ranks together logged."""

    values: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values or self.histograms or self.texts)


class MetricLog:
    """One rank's. `drain` empties it; while nobody logs, it costs nothing."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._scalars: dict[str, float | Tensor] = {}
        self._means: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        self._histograms: dict[str, _Counts] = {}
        self._texts: dict[str, str] = {}

    @property
    def empty(self) -> bool:
        return not (self._scalars or self._means or self._histograms or self._texts)

    def scalar(self, name: str, value: object) -> None:
        self._claim(name, "scalar")
        self._scalars[name] = _number("scalar", name, value)

    def mean(self, name: str, total: object, weight: object) -> None:
        self._claim(name, "mean")
        total_now, weight_now = _number("mean", name, total), _number("mean", name, weight)
        before = self._means.get(name)
        if before is not None:
            total_now, weight_now = _add(before[0], total_now), _add(before[1], weight_now)
        self._means[name] = (total_now, weight_now)

    def histogram(self, name: str, values: object) -> None:
        self._claim(name, "histogram")
        counts = _Counts.of(_tensor("histogram", name, values))
        before = self._histograms.get(name)
        self._histograms[name] = counts if before is None else before.plus(counts)

    def text(self, name: str, text: object) -> None:
        self._claim(name, "text")
        if not isinstance(text, str):
            raise _misfit("text", name, text, "a text", "; log.scalar takes numbers")
        self._texts[name] = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"

    def drain(self) -> LogEntries:
        """Everything logged since the last drain, as plain numbers. Reads what is on a GPU: waits for it."""
        entries = LogEntries(
            {name: float(value) for name, value in self._scalars.items()},
            {name: (float(total), float(weight)) for name, (total, weight) in self._means.items()},
            {name: counts.read() for name, counts in self._histograms.items()},
            dict(self._texts),
        )
        for kept in (self._scalars, self._means, self._histograms, self._texts):
            kept.clear()
        return entries

    def _claim(self, name: object, kind: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"log.{kind}({name!r}): a name is a text, not a {type(name).__name__}")
        before = self._kinds.setdefault(name, kind)
        if before != kind:
            raise ValueError(f"log.{kind}({name!r}): {name!r} was logged by log.{before} before; give it another name")


def merge(entries: Sequence[LogEntries]) -> Logged:
    """All ranks' entries, in the order of ranks, as one.

    Means are sum of sums / sum of weights (left out where nothing weighs anything); scalars the mean over the ranks
    that logged them; histograms are summed; of texts, the first rank's.
    """
    return Logged(
        {**_merge_scalars(entries), **_merge_means(entries)},
        {
            name: _merge_histograms([e.histograms[name] for e in entries if name in e.histograms])
            for name in _names(e.histograms for e in entries)
        },
        {name: next(e.texts[name] for e in entries if name in e.texts) for name in _names(e.texts for e in entries)},
    )


# --- the functions that user code calls -------------------------------------------------------------------------

_current: MetricLog | None = None


@contextmanager
def recording(log: MetricLog) -> Iterator[MetricLog]:
    """Inside, what user code logs goes to `log`; afterwards, to the one before."""
    global _current
    before, _current = _current, log
    try:
        yield log
    finally:
        _current = before


def scalar(name: str, value: float | Tensor) -> None:
    """Logs one number: the last one before the log is due, averaged over the ranks that logged it."""
    if _current is not None:
        _current.scalar(name, value)


def mean(name: str, sum: float | Tensor, weight: float | Tensor) -> None:  # noqa: A002
    """Logs a mean as its sum and its weight (how many), exact over micro-batches, steps and ranks."""
    if _current is not None:
        _current.mean(name, sum, weight)


def histogram(name: str, values: Tensor) -> None:
    """Logs the distribution of a tensor's elements, in bins of an eighth of a decade. Of a sharded one, the rank's."""
    if _current is not None:
        _current.histogram(name, values)


def text(name: str, text: str) -> None:
    """Logs a text, cut to 65,536 characters."""
    if _current is not None:
        _current.text(name, text)


# --- numbers ------------------------------------------------------------------------------------------------------


def _number(kind: str, name: str, value: object) -> float | Tensor:
    """A float if that needs no waiting, otherwise a copy on the device: a later in-place change must not show.

    Raises:
        TypeError: it is no number, and no tensor.
        ValueError: it is several numbers, or a complex one.
    """
    if isinstance(value, int | float):
        return float(value)
    tensor = _tensor(kind, name, value)
    if tensor.numel() != 1:
        raise ValueError(
            f"log.{kind}({name!r}): one number is logged, not a tensor of shape {list(tensor.shape)}; use log.histogram"
        )
    if tensor.device.type == "cpu":
        return float(tensor)
    wide = tensor.float() if tensor.device.type == "mps" else tensor.double()
    return wide.reshape(()).clone()


def _tensor(kind: str, name: str, value: object) -> Tensor:
    """What is logged, as a tensor that needs no gradient: a number of NumPy's and a list of numbers, too."""
    import torch

    if isinstance(value, torch.Tensor):
        found = value.detach()
    else:
        try:
            found = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            wanted = "numbers" if kind == "histogram" else "a number"
            more = "; log.text takes texts" if isinstance(value, str) else ""
            raise _misfit(kind, name, value, wanted, more) from None
    if found.is_complex():
        raise ValueError(f"log.{kind}({name!r}): complex numbers can't be logged; log .abs(), or .real and .imag")
    return found


def _misfit(kind: str, name: str, value: object, wanted: str, more: str) -> TypeError:
    return TypeError(
        f"log.{kind}({name!r}): {wanted} can be logged, not a {type(value).__name__} ({str(value)[:40]!r}){more}"
    )


def _add(total: float | Tensor, more: float | Tensor) -> float | Tensor:
    return total + more if isinstance(total, float) or isinstance(more, float) else total + more.to(total.device)


@dataclass(slots=True)
class _Counts:
    """A histogram on its device, not yet read.

    Attributes:
        counts: [len(EDGES) + 2] int64, the last for what isn't finite.
        moments: [4]: low, high, sum, sum of squares; float64 on a CPU, float32 elsewhere.
    """

    counts: torch.Tensor
    moments: torch.Tensor

    @classmethod
    def of(cls, values: Tensor) -> _Counts:
        import torch

        flat = values.detach().flatten().to(torch.float64 if values.device.type == "cpu" else torch.float32)
        finite = torch.isfinite(flat)
        edges = _edges(flat.device, flat.dtype)
        bins = torch.where(finite, torch.bucketize(flat, edges), len(EDGES) + 1)
        counts = torch.zeros(len(EDGES) + 2, dtype=torch.int64, device=flat.device)
        counts.index_add_(0, bins, torch.ones_like(bins))
        if not flat.numel():
            return cls(counts, flat.new_tensor([math.inf, -math.inf, 0.0, 0.0]))
        low, high = torch.where(finite, flat, math.inf).amin(), torch.where(finite, flat, -math.inf).amax()
        known = torch.where(finite, flat, 0.0)
        return cls(counts, torch.stack([low, high, known.sum(), known.square().sum()]))

    def plus(self, other: _Counts) -> _Counts:
        import torch

        counts, moments = other.counts.to(self.counts.device), other.moments.to(self.moments.device)
        low, high = torch.minimum(self.moments[0], moments[0]), torch.maximum(self.moments[1], moments[1])
        return _Counts(self.counts + counts, torch.stack([low, high, *(self.moments[2:] + moments[2:])]))

    def read(self) -> Histogram:
        *counts, not_finite = self.counts.tolist()
        low, high, total, squares = self.moments.tolist()
        found = {index: count for index, count in enumerate(counts) if count}
        if not found:
            low = high = math.nan
        return Histogram(found, low, high, total, squares, not_finite)


@cache
def _edges(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[len(EDGES)], copied to a device once: a copy makes the host wait."""
    import torch

    return torch.tensor(EDGES, dtype=dtype, device=device)


def _names(parts: Iterable[Mapping[str, object]]) -> list[str]:
    """In the order in which they first come."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _merge_scalars(entries: Sequence[LogEntries]) -> dict[str, float]:
    merged = {}
    for name in _names(entry.scalars for entry in entries):
        values = [entry.scalars[name] for entry in entries if name in entry.scalars]
        merged[name] = sum(values) / len(values)
    return merged


def _merge_means(entries: Sequence[LogEntries]) -> dict[str, float]:
    merged = {}
    for name in _names(entry.means for entry in entries):
        parts = [entry.means[name] for entry in entries if name in entry.means]
        weight = sum(weight for _, weight in parts)
        if weight:
            merged[name] = sum(total for total, _ in parts) / weight
    return merged


def _merge_histograms(parts: Sequence[Histogram]) -> Histogram:
    counts: dict[int, int] = {}
    for part in parts:
        for index, count in part.counts.items():
            counts[index] = counts.get(index, 0) + count
    known = [part for part in parts if part.counts]
    return Histogram(
        counts,
        min((part.low for part in known), default=math.nan),
        max((part.high for part in known), default=math.nan),
        sum(part.total for part in parts),
        sum(part.squares for part in parts),
        sum(part.not_finite for part in parts),
    )
