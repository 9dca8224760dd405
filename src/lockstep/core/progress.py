"""The progress of a run: a value, identical on every rank.

Schedules, evaluations and the data order are functions of it; there is nothing else to save and nothing that
could get out of step. It counts attempted updates (data consumed), kept or discarded alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run, counted in attempted updates.

    Attributes:
        steps: attempted updates, kept or discarded.
        samples: samples consumed, over all ranks: the data cursor.
        tokens: tokens consumed, over all ranks, filler and padding not counted.
    """

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, samples: int, tokens: int) -> Progress:
        """Return the progress one update later."""
        return Progress(self.steps + 1, self.samples + samples, self.tokens + tokens)
