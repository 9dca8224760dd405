"""The progress of a run: a value, identical on every rank; schedules and data order are functions of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run, counted in attempted steps.

    Attributes:
        steps: Kept or discarded.
        samples: Over all ranks: the data cursor.
        tokens: Over all ranks, without padding.
    """

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, samples: int, tokens: int) -> Progress:
        """Return the progress one step later."""
        return Progress(self.steps + 1, self.samples + samples, self.tokens + tokens)


class _Running:
    """The session that trains or evaluates in this process."""

    progress = Progress()


running = _Running()


def step() -> int:
    """Return the number of steps that the run has made: 0 in all micro-batches of the first.

    For a model or objective that changes with the step: a count of forwards would depend on the micro-batches.
    """
    return running.progress.steps
