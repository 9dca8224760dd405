"""The metric log: what a user's objective or loop logs, kept on its rank until it is written.

    from lockstep import log

    log.mean("accuracy", right.sum(), right.numel())     sum and weight: summed over micro-batches and ranks
    log.scalar("temperature", t)                         the last value; mean over ranks
    log.histogram("logits", logits)                      counts in fixed bins; summed over micro-batches and ranks
    log.text("sample", "def ...")                        the last text; of the first rank that logged one

    on every rank   MetricLog.drain() -> LogEntries  --gather-->  merge([...]) -> Logged   -> the monitors

Outside of a run nothing is kept. Values are detached at once; a GPU's tensors are read when the log is drained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bins that are the same on every rank, so that counts can be summed without a message before: eight a decade of
# magnitude from 1e-12 to 1e12, both signs. Bin i holds EDGES[i-1] < x <= EDGES[i]; the first and last are open.
_MAGNITUDES = tuple(10 ** (power / 8) for power in range(-96, 97))
EDGES: tuple[float, ...] = (*(-edge for edge in reversed(_MAGNITUDES)), 0.0, *_MAGNITUDES)
LONGEST_TEXT = 65536
_PIECE = 1 << 20  # elements that are counted at once


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in fixed bins.

    Attributes:
        counts: by bin of `EDGES`, empty bins left out.
        low: smallest finite value; NaN if there is none.
        high: largest finite value; NaN if there is none.
        total: sum of the finite values.
        squares: sum of their squares.
        not_finite: number of NaNs and infinities.
    """

    counts: Mapping[int, int]
    low: float
    high: float
    total: float
    squares: float
    not_finite: int = 0

    @property
    def count(self) -> int:
        """The number of finite values."""
        return sum(self.counts.values())

    def bins(self) -> list[tuple[float, float, int]]:
        """Return (low, high, count) of the bins that aren't empty, in order, clipped to the range of the values."""
        edges = (self.low, *EDGES, self.high)
        return [
            (max(edges[index], self.low), min(edges[index + 1], self.high), self.counts[index])
            for index in sorted(self.counts)
        ]


@dataclass(frozen=True, slots=True)
class LogEntries:
    """Values that one rank logged since the last drain: plain numbers, which can be pickled."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.scalars or self.means or self.histograms or self.texts)


@dataclass(frozen=True, slots=True)
class Logged:
    """Values that all ranks logged, merged.

    Attributes:
        of_model: histograms of weights and gradients (`monitor.histograms`).
    """

    values: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    of_model: Mapping[str, Histogram] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values or self.histograms or self.texts or self.of_model)

    def numbers(self) -> dict[str, float]:
        """Return the values, and how many elements of a histogram aren't finite, where there are any."""
        parts = self.all_histograms().items()
        return {
            **self.values,
            **{f"{name}/not_finite": float(part.not_finite) for name, part in parts if part.not_finite},
        }

    def all_histograms(self) -> dict[str, Histogram]:
        """Return the histograms that user code logged, and those of the model."""
        return {**self.histograms, **self.of_model}


class MetricLog:
    """The log of one rank. `drain` empties it; while user code logs nothing, it costs nothing."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._scalars: dict[str, float | Tensor] = {}
        self._means: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        self._histograms: dict[str, HistogramCounts] = {}
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
        counts = HistogramCounts.of(_tensor("histogram", name, values))
        before = self._histograms.get(name)
        self._histograms[name] = counts if before is None else before.plus(counts)

    def text(self, name: str, text: object) -> None:
        self._claim(name, "text")
        if not isinstance(text, str):
            raise _wrong_type("text", name, text, "a str", "; log.scalar takes numbers")
        self._texts[name] = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"

    def drain(self) -> LogEntries:
        """Return what was logged since the last drain, as plain numbers. Waits for what is on a GPU."""
        entries = LogEntries(
            {name: float(value) for name, value in self._scalars.items()},
            {name: (float(total), float(weight)) for name, (total, weight) in self._means.items()},
            {name: counts.read() for name, counts in self._histograms.items()},
            dict(self._texts),
        )
        for kept in (self._scalars, self._means, self._histograms, self._texts):
            kept.clear()
        return entries

    def take(self) -> MetricLog:
        """Return the entries since the last drain as a log of their own, without reading them; none stay here."""
        taken = MetricLog()
        taken._kinds = self._kinds
        taken._scalars, self._scalars = self._scalars, taken._scalars
        taken._means, self._means = self._means, taken._means
        taken._histograms, self._histograms = self._histograms, taken._histograms
        taken._texts, self._texts = self._texts, taken._texts
        return taken

    def put_back(self, earlier: MetricLog) -> None:
        """Put entries that were taken before those that have come since."""
        since = self.take()
        self._scalars = earlier._scalars | since._scalars
        self._texts = earlier._texts | since._texts
        self._means, self._histograms = earlier._means, earlier._histograms
        for name, (total, weight) in since._means.items():
            before = self._means.get(name)
            self._means[name] = (total, weight) if before is None else (_add(before[0], total), _add(before[1], weight))
        for name, counts in since._histograms.items():
            known = self._histograms.get(name)
            self._histograms[name] = counts if known is None else known.plus(counts)

    def _claim(self, name: object, kind: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"log.{kind}({name!r}): the name must be a str, not {type(name).__name__}")
        before = self._kinds.setdefault(name, kind)
        if before != kind:
            raise ValueError(f"log.{kind}({name!r}): {name!r} was logged by log.{before} before; give it another name")


def merge(entries: Sequence[LogEntries]) -> Logged:
    """Merge all ranks' entries, which are in the order of ranks.

    Means are sum of sums / sum of weights (left out where the weight is 0); scalars the mean over the ranks that logged
    them; histograms are summed; a text is the first rank's.
    """
    scalars, means, histograms, texts = (
        _by_name([getattr(entry, kind) for entry in entries]) for kind in ("scalars", "means", "histograms", "texts")
    )
    weights = {name: sum(weight for _, weight in parts) for name, parts in means.items()}
    return Logged(
        {
            **{name: sum(values) / len(values) for name, values in scalars.items()},
            **{name: sum(total for total, _ in means[name]) / weight for name, weight in weights.items() if weight},
        },
        {name: merge_histograms(parts) for name, parts in histograms.items()},
        {name: parts[0] for name, parts in texts.items()},
    )


def _by_name(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the ranks' values by name, in the order in which the names first come."""
    values: dict[str, list[Any]] = {}
    for logged in of_ranks:
        for name, value in logged.items():
            values.setdefault(name, []).append(value)
    return values


def merge_histograms(parts: Sequence[Histogram]) -> Histogram:
    """Return the histogram of all parts' values."""
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(part.counts)
    known = [part for part in parts if part.counts]
    return Histogram(
        dict(counts),
        min((part.low for part in known), default=math.nan),
        max((part.high for part in known), default=math.nan),
        sum(part.total for part in parts),
        sum(part.squares for part in parts),
        sum(part.not_finite for part in parts),
    )


# --- the functions that user code calls ----------------------------------------------------------------------------

_current: MetricLog | None = None


@contextmanager
def recording(log: MetricLog) -> Iterator[MetricLog]:
    """Send what user code logs inside the block to `log`."""
    global _current
    before, _current = _current, log
    try:
        yield log
    finally:
        _current = before


def scalar(name: str, value: float | Tensor) -> None:
    """Log one number: the last value before the log is written, averaged over the ranks that logged it."""
    if _current is not None:
        _current.scalar(name, value)


def mean(name: str, sum: float | Tensor, weight: float | Tensor) -> None:  # noqa: A002
    """Log a mean as its sum and its weight (the number of values), exact over micro-batches, steps and ranks."""
    if _current is not None:
        _current.mean(name, sum, weight)


def histogram(name: str, values: Tensor) -> None:
    """Log the distribution of a tensor's elements, in bins of an eighth of a decade; of a sharded one, its shard."""
    if _current is not None:
        _current.histogram(name, values)


def text(name: str, text: str) -> None:
    """Log a text, cut to 65,536 characters."""
    if _current is not None:
        _current.text(name, text)


def merged_histogram(values: Tensor) -> Histogram:
    """Return the distribution of all ranks' elements, such as gradients; a collective, in any loop."""
    own = HistogramCounts.of(_tensor("histogram", "values", values)).read()
    from lockstep.distributed.user_collectives import gather  # it imports torch

    return merge_histograms(gather(own))


# --- numbers ------------------------------------------------------------------------------------------------------


def _number(kind: str, name: str, value: object) -> float | Tensor:
    """Return a float if that needs no waiting, otherwise a copy on the device: later in-place changes must not show.

    Raises:
        TypeError: the value is neither a number nor a tensor.
        ValueError: it is several numbers, or a complex one.
    """
    if isinstance(value, int | float):
        return float(value)
    tensor = _tensor(kind, name, value)
    if tensor.numel() != 1:
        raise ValueError(
            f"log.{kind}({name!r}): expected one number, got a tensor of shape {list(tensor.shape)}; use log.histogram"
        )
    if tensor.device.type == "cpu":
        return float(tensor)
    wide = tensor.float() if tensor.device.type == "mps" else tensor.double()
    return wide.reshape(()).clone()


def _tensor(kind: str, name: str, value: object) -> Tensor:
    """Return the value, which may be a NumPy number or a list of numbers, as a tensor without gradient."""
    import torch

    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    else:
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            wanted = "numbers" if kind == "histogram" else "a number"
            more = "; log.text takes strings" if isinstance(value, str) else ""
            raise _wrong_type(kind, name, value, wanted, more) from None
    if tensor.is_complex():
        raise ValueError(f"log.{kind}({name!r}): complex numbers can't be logged; log .abs(), or .real and .imag")
    return tensor


def _wrong_type(kind: str, name: str, value: object, expected: str, remedy: str) -> TypeError:
    given = f"{type(value).__name__} ({str(value)[:40]!r})"
    return TypeError(f"log.{kind}({name!r}): expected {expected}, got {given}{remedy}")


def _add(total: float | Tensor, more: float | Tensor) -> float | Tensor:
    return total + more if isinstance(total, float) or isinstance(more, float) else total + more.to(total.device)


@dataclass(slots=True)
class HistogramCounts:
    """A histogram on its device, not read yet.

    Attributes:
        counts: [len(EDGES) + 2] int64, the last for what isn't finite.
        moments: [4]: low, high, sum, sum of squares; float64 on a CPU, float32 elsewhere.
    """

    counts: torch.Tensor
    moments: torch.Tensor

    @classmethod
    def of(cls, values: Tensor) -> HistogramCounts:
        """Count a tensor's elements, in pieces: bins take 16 bytes an element."""
        import torch

        first, *rest = torch.split(values.detach().flatten(), _PIECE)
        counts = cls._of_piece(first)
        for piece in rest:
            counts = counts.plus(cls._of_piece(piece))
        return counts

    @classmethod
    def _of_piece(cls, values: Tensor) -> HistogramCounts:
        import torch

        flat = values.to(torch.float64 if values.device.type == "cpu" else torch.float32)
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

    def plus(self, other: HistogramCounts) -> HistogramCounts:
        import torch

        counts, moments = other.counts.to(self.counts.device), other.moments.to(self.moments.device)
        low, high = torch.minimum(self.moments[0], moments[0]), torch.maximum(self.moments[1], moments[1])
        return HistogramCounts(self.counts + counts, torch.stack([low, high, *(self.moments[2:] + moments[2:])]))

    def read(self) -> Histogram:
        *counts, not_finite = self.counts.tolist()
        low, high, total, squares = self.moments.tolist()
        known = {index: count for index, count in enumerate(counts) if count}
        if not known:
            low = high = math.nan
        return Histogram(known, low, high, total, squares, not_finite)


@cache
def _edges(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return EDGES as a tensor, copied to a device once: a copy makes the host wait."""
    import torch

    return torch.tensor(EDGES, dtype=dtype, device=device)
