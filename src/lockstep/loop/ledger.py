"""The record of the samples that a run's updates have consumed, over all its attempts.

attempt 1, 2 ranks    [0 ............ 4,096)    digest     a checkpoint's ledger covers the updates that led to its
attempt 2, 4 ranks    [4,096 ........ 9,216)    digest     weights; updates that were lost are not in it

The ranks add up the digests in their votes. `audit` recomputes them from the recorded order, without the data, to prove
that no sample is missing or repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.core.errors import VerificationError
from lockstep.core.records import LeftOutSample
from lockstep.data.order import MODULUS, SampleOrder, digest

if TYPE_CHECKING:
    from lockstep.loop.components import Components

MAX_SAMPLES = 2**36  # recomputing their digests takes about an hour
_CHUNK = 2**14  # positions at a time: intermediate results stay in the CPU's cache
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """The mapping of positions in a run to samples."""

    seed: int
    shuffle: bool
    samples: int
    epoch_samples: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive updates of one attempt.

    Attributes:
        attempt: from 1; 0: another program used them (`imported_ledger`).
        first, last: positions; `last` is exclusive.
        digest: of these samples (`data.order`), summed over the ranks.
    """

    attempt: int
    ranks: int
    first: int
    last: int
    digest: int
    order: OrderFacts


class Ledger:
    """The segments of a run; updates are added as the current attempt makes them."""

    def __init__(self, ranks: int, order: OrderFacts) -> None:
        self._ranks = ranks
        self._order = order
        self.attempt = 1
        self._closed: list[Segment] = []
        self._first = self._last = 0
        self._digest = 0

    def add(self, first: int, last: int, digest: float) -> None:
        """Add an update. Every step calls it, so it only adds (0.2 us)."""
        if first != self._last:
            self._closed = self.segments
            self._first, self._digest = first, 0
        self._last = last
        self._digest += int(digest)

    @property
    def segments(self) -> list[Segment]:
        """Segments in the order of their making."""
        if self._first == self._last:
            return list(self._closed)
        digest = self._digest % MODULUS
        return [*self._closed, Segment(self.attempt, self._ranks, self._first, self._last, digest, self._order)]

    def state(self) -> list[dict[str, Any]]:
        """Return the segments as plain JSON."""
        return [asdict(segment) for segment in self.segments]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Continue the ledger of a checkpoint, with a new attempt."""
        self._closed = segments_in(state)
        self.attempt = 1 + max((segment.attempt for segment in self._closed), default=0)
        self._first = self._last = self._closed[-1].last if self._closed else 0
        self._digest = 0


def imported_ledger(order: OrderFacts, samples: int) -> list[dict[str, Any]]:
    """Return the ledger of a run that another program began, in an order of its own."""
    return [asdict(Segment(0, 0, 0, samples, 0, order))] if samples else []


def left_out_in(state: Iterable[Mapping[str, Any]]) -> list[LeftOutSample]:
    """Return the samples that a checkpoint lists as left out. Raises TypeError if the list is invalid."""
    return [LeftOutSample(**fields) for fields in state]


def order_of(components: Components) -> OrderFacts:
    """Return the mapping of positions to samples of a session."""
    config, source = components.config, components.source
    return OrderFacts(
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        samples=source.facts.samples,
        epoch_samples=components.plan.epoch_samples,
        fingerprint=source.fingerprint,
    )


def segments_in(state: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """Return the segments that `Ledger.state` wrote. Raises TypeError or KeyError if it is invalid."""
    return [Segment(**{**segment, "order": OrderFacts(**segment["order"])}) for segment in state]


@dataclass(frozen=True, slots=True)
class Audit:
    """The evidence of a ledger about the samples that a run has consumed. Spans are positions, the last exclusive.

    Attributes:
        gaps, repeats: spans that no update, or more than one, consumed.
        mismatches: segments with other samples than the order's.
        expected: the digest that each segment must have.
        changes: (position, what changed there in how positions map to samples).
    """

    samples: int
    gaps: tuple[Span, ...]
    repeats: tuple[Span, ...]
    mismatches: tuple[Span, ...]
    segments: tuple[Segment, ...]
    expected: tuple[int, ...]
    changes: tuple[tuple[int, str], ...]
    left_out: tuple[LeftOutSample, ...] = ()

    @property
    def complete(self) -> bool:
        """True if every position was consumed once, with the right sample, or is known to be left out."""
        return not (self.gaps or self.repeats or self.mismatches)


def audit(state: Mapping[str, Any], samples: int) -> Audit:
    """Audit the state in a checkpoint's manifest. Raises VerificationError if it has no valid ledger.

    Args:
        samples: samples that the run has consumed, by the manifest's progress.
    """
    segments, left_out = _segments(state), _left_out(state, samples)
    expected = tuple(
        (expected_digest(segment.order, segment.first, segment.last) - _digest_of(left_out, segment)) % MODULUS
        for segment in segments
    )
    gaps, repeats = _coverage(segments, samples)
    shifted_gaps, shifted_repeats = _epoch_shifts(segments)
    return Audit(
        samples=samples,
        gaps=tuple(sorted(gaps + shifted_gaps)),
        repeats=tuple(sorted(repeats + shifted_repeats)),
        mismatches=tuple(
            (segment.first, segment.last)
            for segment, right in zip(segments, expected, strict=True)
            if segment.digest != right and segment.attempt
        ),
        segments=tuple(segments),
        expected=expected,
        changes=tuple(_changes(segments)),
        left_out=tuple(left_out),
    )


def expected_digest(order: OrderFacts, first: int, last: int) -> int:
    """Return the digest of the samples at positions `first` to `last`, exclusive."""
    sample_order = SampleOrder(order.samples, order.seed, shuffle=order.shuffle)
    total = 0
    while first < last:
        epoch, position = divmod(first, order.epoch_samples)
        end = min(last, (epoch + 1) * order.epoch_samples)
        is_whole_epoch = end - first == order.samples  # its order, which takes most of the time, doesn't matter then
        for start in range(first, end, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, end), dtype=np.int64) - (first - position)
            total += digest(epoch, positions if is_whole_epoch else sample_order.indices(epoch, positions))
        first = end
    return total % MODULUS


def _segments(state: Mapping[str, Any]) -> list[Segment]:
    if not state.get("ledger"):
        raise VerificationError("it has no ledger, so there is no record of the samples it was trained on")
    try:
        segments = segments_in(state["ledger"])
    except (TypeError, KeyError) as error:
        raise VerificationError(f"its ledger can't be read: {error}") from None
    for number, segment in enumerate(segments):
        order = segment.order
        numbers = (segment.first, segment.last, segment.digest, order.seed, order.samples, order.epoch_samples)
        if not (
            all(isinstance(value, int) for value in numbers)
            and 0 <= segment.first < segment.last
            and 0 < order.epoch_samples <= order.samples
        ):
            raise VerificationError(f"its ledger is invalid: segment {number} is {segment}")
    claimed = sum(segment.last - segment.first for segment in segments)
    if claimed > MAX_SAMPLES:
        raise VerificationError(f"its ledger has {claimed:,} samples, and an audit computes {MAX_SAMPLES:,} at most")
    return segments


def _left_out(state: Mapping[str, Any], samples: int) -> list[LeftOutSample]:
    try:
        listed = left_out_in(state.get("left_out", ()))
        return [sample for sample in listed if 0 <= sample.position < samples and sample.index >= 0]
    except TypeError as error:
        raise VerificationError(f"its list of samples that are left out can't be read: {error}") from None


def _digest_of(left_out: Sequence[LeftOutSample], segment: Segment) -> int:
    epoch_samples, total, first = segment.order.epoch_samples, 0, segment.first
    while first < segment.last:
        epoch = first // epoch_samples
        last = min(segment.last, (epoch + 1) * epoch_samples)
        of_epoch = [sample for sample in left_out if sample.position < last and first < (sample.until or last)]
        lacked = np.array(sorted(_lacked(of_epoch, segment.order, first, last)), dtype=np.int64)
        total += digest(epoch, lacked) if len(lacked) else 0
        first = last
    return total


def _lacked(left_out: Sequence[LeftOutSample], order: OrderFacts, first: int, last: int) -> set[int]:
    """Return which of the samples are left out at the positions `first` to `last`, exclusive, of one epoch."""
    is_whole_epoch = last - first == order.samples
    everywhere = {s.index for s in left_out if is_whole_epoch and s.position <= first and s.until is None}
    somewhere = [sample for sample in left_out if sample.index not in everywhere]
    if not somewhere:
        return everywhere
    wanted = np.array([sample.index for sample in somewhere], dtype=np.int64)
    places: dict[int, int] = {}
    sample_order = SampleOrder(order.samples, order.seed, shuffle=order.shuffle)
    epoch = first // order.epoch_samples
    for start in range(first, last, _CHUNK):
        positions = np.arange(start, min(start + _CHUNK, last), dtype=np.int64)
        indices = sample_order.indices(epoch, positions - epoch * order.epoch_samples)
        is_wanted = np.isin(indices, wanted)
        places.update(zip(indices[is_wanted].tolist(), positions[is_wanted].tolist(), strict=True))
    return everywhere | {
        sample.index
        for sample in somewhere
        if sample.position <= places.get(sample.index, -1) < (last if sample.until is None else sample.until)
    }


def _coverage(segments: Iterable[Segment], samples: int) -> tuple[list[Span], list[Span]]:
    """Return the positions of 0 .. `samples` in no segment, and those in more than one segment or beyond."""
    gaps, repeats, reach = [], [], 0
    for segment in sorted(segments, key=lambda segment: segment.first):
        if segment.first > reach:
            gaps.append((reach, segment.first))
        if segment.first < reach:
            repeats.append((segment.first, min(segment.last, reach)))
        reach = max(reach, segment.last)
    if reach < samples:
        gaps.append((reach, samples))
    if reach > samples:
        repeats.append((samples, reach))  # the next attempt would consume them again
    return gaps, repeats


def _epoch_shifts(segments: Sequence[Segment]) -> tuple[list[Span], list[Span]]:
    """Return what was skipped, and what repeated, where only the length of an epoch changed."""
    gaps, repeats = [], []
    for before, after in pairwise(segments):
        length = before.order.epoch_samples
        if replace(after.order, epoch_samples=length) != before.order or after.first != before.last:
            continue
        epoch, position = divmod(after.first, after.order.epoch_samples)
        continues_at = epoch * length + min(position, length)
        if continues_at > before.last:
            gaps.append((before.last, continues_at))
        if continues_at < before.last:
            repeats.append((continues_at, before.last))
    return gaps, repeats


_ORDER_TERMS = {
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "samples": "samples of the dataset",
    "epoch_samples": "samples of an epoch",
}


def _changes(segments: Sequence[Segment]) -> Iterator[tuple[int, str]]:
    for before, after in pairwise(segments):
        for name, term in _ORDER_TERMS.items():
            then, now = getattr(before.order, name), getattr(after.order, name)
            if then != now:
                yield after.first, f"{term}: {then}, then {now}"
        if before.order.fingerprint != after.order.fingerprint:
            yield after.first, "other data"
