"""The clock of an update's phases: every moment belongs to one of them, on the host and on a device."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.phase_clock import Durations, Phase, PhaseClock, UpdateTimes


class Time:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Event:
    """An event of a stream that runs behind the host by `lag` seconds."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.at = time.now

    def query(self) -> bool:
        return self._time.now > self.at + 1.0

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


@given(st.lists(st.tuples(st.sampled_from(Phase), st.floats(0.001, 10)), min_size=1, max_size=30))
def test_the_phases_of_an_update_add_up_to_its_time(marks: list[tuple[Phase, float]]) -> None:
    time = Time()
    clock = PhaseClock(now=time)
    clock.updated()
    clock.take()
    for phase, seconds in marks:
        clock.enter(phase)
        time.now += seconds
    clock.updated()
    times = clock.take()
    whole = sum(seconds for _, seconds in marks)
    assert sum(times.split) == pytest.approx(whole)
    assert times.durations.total + times.evaluation == pytest.approx(whole)


def test_the_first_update_of_a_process_is_left_out_since_it_does_what_is_done_once() -> None:
    time = Time()
    clock = PhaseClock(now=time)
    for seconds in (30.0, 1.0, 1.0):
        clock.enter(Phase.FORWARD)
        time.now += seconds
        clock.updated()
    assert clock.take().durations.high == 1.0
    assert clock.position().updates == 3


def test_collectives_of_a_save_or_an_evaluation_are_no_communication_of_an_update() -> None:
    time = Time()
    clock = PhaseClock(now=time)
    clock.updated()
    for phase in (Phase.SAVE, Phase.EVALUATION, Phase.BACKWARD):
        clock.enter(phase)
        before = clock.enter(Phase.COMMUNICATION)
        time.now += 1.0
        clock.enter(before)
        assert clock.position().phase is phase
    clock.updated()
    times = clock.take()
    assert [times.split[phase] for phase in (Phase.SAVE, Phase.BACKWARD, Phase.COMMUNICATION)] == [1.0, 0.0, 1.0]
    assert times.evaluation == 1.0


def test_what_a_rank_does_is_seen_from_another_thread_while_it_is_stuck() -> None:
    clock = PhaseClock()
    clock.enter(Phase.DATA)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(clock.position()))
    thread.start()
    thread.join()
    assert seen[0].phase is Phase.DATA
    assert seen[0].seconds > 0


def test_phases_of_a_device_are_those_of_its_stream_in_one_of_eight_updates() -> None:
    time = Time()
    clock = PhaseClock(lambda: Event(time), now=time)
    for _ in range(25):
        clock.enter(Phase.FORWARD)
        time.now += 1.0
        clock.enter(Phase.BACKWARD)
        time.now += 2.0
        clock.updated()
    times = clock.take()
    assert times.durations.count == 24
    assert times.measured == 2
    assert times.split[Phase.FORWARD] == pytest.approx(2.0)
    assert times.split[Phase.BACKWARD] == pytest.approx(4.0)


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_percentiles_are_exact_to_one_percent(seconds: list[float], share: float) -> None:
    durations = Durations()
    for value in seconds:
        durations.add(value)
    exact = sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
    assert durations.percentile(share) == pytest.approx(exact, rel=0.0101)
    assert durations.mean == pytest.approx(sum(seconds) / len(seconds))


@given(st.lists(st.floats(1e-5, 1e4), max_size=50), st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=50))
def test_what_was_added_since_an_earlier_moment_is_the_difference_of_totals(
    earlier: list[float], later: list[float]
) -> None:
    total, before, alone = UpdateTimes(), UpdateTimes(), UpdateTimes()
    for value in earlier:
        total.durations.add(value)
        before.durations.add(value)
    for value in later:
        total.durations.add(value)
        alone.durations.add(value)
    since = total.since(before)
    assert since.durations.bins == alone.durations.bins
    assert since.durations.count == alone.durations.count
    assert since.durations.total == pytest.approx(alone.durations.total, rel=1e-6, abs=1e-9 * total.durations.total)
    assert since.durations.percentile(0.5) == pytest.approx(alone.durations.percentile(0.5), rel=0.0201)


def test_nothing_was_timed_yet() -> None:
    durations = Durations()
    assert math.isnan(durations.mean)
    assert math.isnan(durations.percentile(0.5))
