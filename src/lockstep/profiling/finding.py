"""A finding of a profile."""

from __future__ import annotations

from dataclasses import dataclass


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
