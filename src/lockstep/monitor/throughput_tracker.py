"""The speed of any loop: time of a step, samples and tokens a second.

tracker.start()  step  step  step  step      (evaluation)  tracker.start()  step  step
                 |<-- window: average() -->|  no step's    |<-- measured -->|
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.phase_clock import Durations


@dataclass(frozen=True, slots=True)
class ThroughputAverage:
    """The speed over some steps; NaN where there were none.

    Attributes:
        steps: Number of them.
        seconds: All of them took.
        step_seconds: Mean of one.
        deviation: Standard deviation of one step's seconds.
    """

    steps: int
    seconds: float
    step_seconds: float
    deviation: float
    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float


class ThroughputTracker:
    """Measures the steps of a loop on this rank.

    On a GPU, the host runs ahead of the device by some steps; averages over tens of steps are right all the same.

    Args:
        window: Number of newest steps that `average` is about.
        now: Returns seconds.
    """

    def __init__(self, window: int = 50, now: Callable[[], float] = time.perf_counter) -> None:
        if window < 1:
            raise ValueError(f"the window of a ThroughputTracker is a number of steps, at least 1; not {window}")
        self._now = now
        self._window: deque[tuple[float, float, float]] = deque(maxlen=window)  # seconds, samples, tokens
        self._since: float | None = None
        self.reset()

    def start(self) -> None:
        """Begin a step now, without the time since the last one: before the first step, and after a pause."""
        self._since = self._now()

    def step(self, samples: float = 0, tokens: float = 0) -> float:
        """End a step that has consumed `samples` and `tokens`, and begin the next; return its seconds.

        Raises:
            RuntimeError: `start` wasn't called.
            ValueError: `samples` or `tokens` is negative.
        """
        if not (samples >= 0 and tokens >= 0):
            raise ValueError(
                f"ThroughputTracker.step: a step consumes 0 samples and tokens or more, not {samples} and {tokens}"
            )
        if self._since is None:
            raise RuntimeError("ThroughputTracker.step was called before start; call start() before the loop")
        now = self._now()
        seconds, self._since = now - self._since, now
        self._window.append((seconds, samples, tokens))
        self._durations.add(seconds)
        return seconds

    def average(self) -> ThroughputAverage:
        """Return the speed over the newest steps, as many as the window has."""
        steps = len(self._window)
        seconds, samples, tokens = (
            (math.fsum(column) for column in zip(*self._window, strict=True)) if steps else (0.0,) * 3
        )
        durations = Durations()
        for duration, _, _ in self._window:
            durations.add(duration)

        def rate(number: float) -> float:
            return number / seconds if seconds else math.nan

        return ThroughputAverage(
            steps, seconds, durations.mean, durations.deviation, rate(steps), rate(samples), rate(tokens)
        )

    def percentiles(self, *shares: float) -> dict[float, float]:
        """Return the seconds that these shares of all steps since the last reset don't exceed, to 1 %.

        Args:
            shares: In [0, 1]; by default the median, 0.95 and 0.99.

        Raises:
            ValueError: A share is outside of [0, 1].
        """
        for share in shares:
            if not 0 <= share <= 1:
                near = f"; for the {share:g}th percentile, it is {share / 100:g}" if 1 < share <= 100 else ""
                raise ValueError(f"ThroughputTracker.percentiles: a share is a number from 0 to 1, not {share:g}{near}")
        return {share: self._durations.percentile(share) for share in shares or (0.5, 0.95, 0.99)}

    def reset(self) -> None:
        """Forget all steps, for example those of the warmup. A step that has begun continues."""
        self._window.clear()
        self._durations = Durations()
