"""A finding of a profile."""

from __future__ import annotations

from dataclasses import dataclass

RAISE_MICRO_SIZE = "raise batch.micro_size (auto: the largest that fits in memory)"
RAISE_SIZES = (
    "raise batch.global_size or batch.micro_size (auto: the largest that fits in memory): an update exchanges as much "
    "for more samples"
)


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """A cause that limits a run.

    Attributes:
        name: Such as `data`, for programs.
        text: A sentence.
        remedy: What to try.
        gain: Share of an update that it would save at most.
    """

    name: str
    text: str
    remedy: str
    gain: float
