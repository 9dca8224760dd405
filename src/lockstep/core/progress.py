"""The progress of a run: a value, identical on every rank.

Schedules, evaluations and the data order are functions of it; nothing else needs to be saved or kept in step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run, counted in attempted updates.

    Attributes:
        steps: Attempted updates, kept or discarded.
        samples: Samples consumed, over all ranks: the data cursor.
        tokens: Tokens consumed, over all ranks, without padding tokens and padding samples.
    """

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, samples: int, tokens: int) -> Progress:
        """Return the progress one update later."""
        return Progress(self.steps + 1, self.samples + samples, self.tokens + tokens)
