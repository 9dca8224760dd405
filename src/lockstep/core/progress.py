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


class _Running:
    """The session that trains or evaluates in this process, for what user code asks."""

    progress = Progress()


running = _Running()


def step() -> int:
    """Return the number of updates that the run has made: 0 in all micro-batches of its first update.

    For a model or an objective that changes with the update, such as the weight of a term that grows: a count of
    forwards would depend on the number of micro-batches.
    """
    return running.progress.steps
