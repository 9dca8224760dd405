"""Whether a run was trained on every sample of its order, once: proved from a checkpoint's ledger, without the data.

ledger    [0 ..... 4,096) digest     [4,096 ..... 9,216) digest       what the ranks added up in their votes
order     digest of 0 ..... 4,096    digest of 4,096 ..... 9,216      what it must be: recomputed from the seed
              equal?                     equal?                       and the segments lie end to end?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.core.errors import VerificationError
from lockstep.data.order import MODULUS, SampleOrder, digest
from lockstep.training.ledger import OrderFacts, Segment, segments_in

MOST_SAMPLES = 2**36  # to recompute in an audit: about an hour
_CHUNK = 2**14  # positions at a time: what is computed of them stays in the cache

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Audit:
    """What a ledger proves of the samples that a run has consumed.

    Attributes:
        samples: consumed by the run, as its progress says.
        gaps: positions that no update has had, from the first of them up to, not including, the last.
        repeats: positions that more than one update has had.
        mismatches: segments that had other samples than the order says.
        segments: what attempts have done, as the ledger has it.
        expected: the digest that each must have.
        changes: what made the positions from here on other samples: (position, what was changed).
    """

    samples: int
    gaps: tuple[Span, ...]
    repeats: tuple[Span, ...]
    mismatches: tuple[Span, ...]
    segments: tuple[Segment, ...]
    expected: tuple[int, ...]
    changes: tuple[tuple[int, str], ...]

    @property
    def complete(self) -> bool:
        """Every position once, each with the sample that belongs there."""
        return not (self.gaps or self.repeats or self.mismatches)


def audit(state: Mapping[str, Any], samples: int) -> Audit:
    """Of the state in a checkpoint's manifest, whose progress is `samples`.

    Raises:
        VerificationError: it has no ledger, or none that makes sense.
    """
    segments = _segments(state)
    expected = tuple(expected_digest(one.order, one.first, one.last) for one in segments)
    gaps, repeats = _coverage(segments, samples)
    shifted_gaps, shifted_repeats = _shifts(segments)
    return Audit(
        samples=samples,
        gaps=tuple(sorted(gaps + shifted_gaps)),
        repeats=tuple(sorted(repeats + shifted_repeats)),
        mismatches=tuple(
            (one.first, one.last) for one, wanted in zip(segments, expected, strict=True) if one.digest != wanted
        ),
        segments=tuple(segments),
        expected=expected,
        changes=tuple(_changes(segments)),
    )


def expected_digest(order: OrderFacts, first: int, last: int) -> int:
    """Of samples `first` up to `last` of a run in this order."""
    drawn = SampleOrder(order.samples, order.seed, shuffle=order.shuffle)
    total = 0
    while first < last:
        epoch, position = divmod(first, order.epoch_samples)
        end = min(last, (epoch + 1) * order.epoch_samples)
        whole = end - first == order.samples  # then its order changes nothing, and takes the most time
        for start in range(first, end, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, end), dtype=np.int64) - (first - position)
            total += digest(epoch, positions if whole else drawn.indices(epoch, positions))
        first = end
    return total % MODULUS


def _segments(state: Mapping[str, Any]) -> list[Segment]:
    found = state.get("ledger")
    if not found:
        raise VerificationError("it has no ledger: nothing says which samples it was trained on")
    try:
        segments = segments_in(found)
    except (TypeError, KeyError) as error:
        raise VerificationError(f"its ledger can't be read: {error}") from None
    for number, one in enumerate(segments):
        if not _makes_sense(one):
            raise VerificationError(f"its ledger makes no sense: segment {number} is {one}")
    claimed = sum(one.last - one.first for one in segments)
    if claimed > MOST_SAMPLES:
        raise VerificationError(f"its ledger names {claimed:,} samples, and an audit computes {MOST_SAMPLES:,} at most")
    return segments


def _makes_sense(one: Segment) -> bool:
    numbers = (one.first, one.last, one.digest, one.order.seed, one.order.samples, one.order.epoch_samples)
    if not all(isinstance(number, int) for number in numbers):
        return False
    return 0 <= one.first < one.last and 0 < one.order.epoch_samples <= one.order.samples


# --- end to end? --------------------------------------------------------------------------------------------------


def _coverage(segments: Iterable[Segment], samples: int) -> tuple[list[Span], list[Span]]:
    """Positions of 0 .. `samples` that are in no segment, and those that are in more than one, or beyond."""
    gaps, repeats, reach = [], [], 0
    for one in sorted(segments, key=lambda one: one.first):
        if one.first > reach:
            gaps.append((reach, one.first))
        if one.first < reach:
            repeats.append((one.first, min(one.last, reach)))
        reach = max(reach, one.last)
    if reach < samples:
        gaps.append((reach, samples))
    if reach > samples:
        repeats.append((samples, reach))  # the next attempt will have them again
    return gaps, repeats


def _shifts(segments: Sequence[Segment]) -> tuple[list[Span], list[Span]]:
    """Where an epoch got another length, the same position is another one of the same order: what lies between the two
    was skipped, or comes again. Counted by the positions of before."""
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


_WORDS = {
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "samples": "samples of the data set",
    "epoch_samples": "samples of an epoch",
}


def _changes(segments: Sequence[Segment]) -> Iterable[tuple[int, str]]:
    """What somebody has accepted, or has changed of the batch."""
    for before, after in pairwise(segments):
        for name, word in _WORDS.items():
            then, now = getattr(before.order, name), getattr(after.order, name)
            if then != now:
                yield after.first, f"{word}: {then}, then {now}"
        if before.order.fingerprint != after.order.fingerprint:
            yield after.first, "other data"
