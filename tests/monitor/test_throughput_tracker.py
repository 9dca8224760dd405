"""The throughput tracker by a clock that a test sets."""

from __future__ import annotations

import math

import pytest

from lockstep.loops import ThroughputTracker


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def tracked(seconds: list[float], window: int = 50) -> tuple[ThroughputTracker, Clock]:
    clock = Clock()
    tracker = ThroughputTracker(window, clock)
    tracker.start()
    for duration in seconds:
        clock.time += duration
        assert tracker.step(samples=8, tokens=80) == pytest.approx(duration)
    return tracker, clock


def test_an_average_is_over_the_newest_steps() -> None:
    average = tracked([100.0, 1.0, 3.0], window=2)[0].average()
    assert (average.steps, average.seconds, average.step_seconds, average.deviation) == (2, 4.0, 2.0, 1.0)
    assert (average.steps_per_second, average.samples_per_second, average.tokens_per_second) == (0.5, 4.0, 40.0)


def test_a_pause_belongs_to_no_step() -> None:
    tracker, clock = tracked([1.0])
    clock.time += 1000
    tracker.start()
    clock.time += 2.0
    tracker.step(8)
    assert tracker.average().seconds == 3.0


def test_percentiles_are_over_all_steps_and_a_reset_forgets_them() -> None:
    tracker, clock = tracked([0.1] * 90 + [1.0] * 10, window=5)
    shares = tracker.percentiles()
    assert shares[0.5] == pytest.approx(0.1, rel=0.01)
    assert shares[0.95] == shares[0.99] == pytest.approx(1.0, rel=0.01)
    assert tracker.percentiles(0.9)[0.9] == pytest.approx(0.1, rel=0.01)
    clock.time += 0.5
    tracker.reset()
    assert math.isnan(tracker.average().samples_per_second)
    assert math.isnan(tracker.percentiles(0.5)[0.5])
    clock.time += 0.5
    assert tracker.step() == 1.0  # the step that had begun


def test_mistakes_are_named() -> None:
    with pytest.raises(RuntimeError, match="call start"):
        ThroughputTracker().step()
    with pytest.raises(ValueError, match="from 0 to 1"):
        ThroughputTracker().percentiles(95)
