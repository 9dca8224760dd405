"""Histograms in bins that are the same on every rank: counts can be summed without a message before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Eight a decade of magnitude from 1e-12 to 1e12, both signs. Bin i holds EDGES[i-1] < x <= EDGES[i]; the first and last
# are open.
_MAGNITUDES = tuple(10 ** (power / 8) for power in range(-96, 97))
EDGES: tuple[float, ...] = (*(-edge for edge in reversed(_MAGNITUDES)), 0.0, *_MAGNITUDES)
_PIECE = 1 << 20  # elements that are counted at once


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by bin of `EDGES`, without empty bins; range (NaN: none) and sum of the finite values."""

    counts: Mapping[int, int]
    low: float
    high: float
    total: float
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
        sum(part.not_finite for part in parts),
    )


@dataclass(slots=True)
class HistogramCounts:
    """A histogram on its device: counts, the last of what isn't finite; low, high and sum (float64 on a CPU)."""

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
        bins = torch.where(finite, torch.bucketize(flat, _edges(flat.device, flat.dtype)), len(EDGES) + 1)
        counts = torch.zeros(len(EDGES) + 2, dtype=torch.int64, device=flat.device)
        counts.index_add_(0, bins, torch.ones_like(bins))
        if not flat.numel():
            return cls(counts, flat.new_tensor([math.inf, -math.inf, 0.0]))
        low, high = torch.where(finite, flat, math.inf).amin(), torch.where(finite, flat, -math.inf).amax()
        return cls(counts, torch.stack([low, high, torch.where(finite, flat, 0.0).sum()]))

    def plus(self, other: HistogramCounts) -> HistogramCounts:
        import torch

        counts, moments = other.counts.to(self.counts.device), other.moments.to(self.moments.device)
        low, high = torch.minimum(self.moments[0], moments[0]), torch.maximum(self.moments[1], moments[1])
        return HistogramCounts(self.counts + counts, torch.stack([low, high, self.moments[2] + moments[2]]))

    def read(self) -> Histogram:
        *counts, not_finite = self.counts.tolist()
        low, high, total = self.moments.tolist()
        known = {index: count for index, count in enumerate(counts) if count}
        if not known:
            low = high = math.nan
        return Histogram(known, low, high, total, not_finite)


@cache
def _edges(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return EDGES as a tensor, copied to a device once: a copy makes the host wait."""
    import torch

    return torch.tensor(EDGES, dtype=dtype, device=device)
