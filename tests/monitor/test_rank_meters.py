"""What ranks post, and what is made of it: intervals, stragglers, files."""

from __future__ import annotations

import json
import math
import socket
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.phase_clock import Durations, Phase, PhaseClock, UpdateTimes
from lockstep.distributed.notice_board import NoticeBoard
from lockstep.monitor.rank_meters import (
    LIVE,
    RANKS,
    MeterFiles,
    MeterReport,
    RankInterval,
    RankMeters,
    RankNotice,
    meter_values,
)


def times_of(updates: int, **seconds: float) -> UpdateTimes:
    """Times of equal updates with these seconds by phase."""
    times = UpdateTimes()
    for _ in range(updates):
        times.durations.add(sum(seconds.values()))
        for name, value in seconds.items():
            times.split[Phase[name]] += value
        times.measured += 1
    return times


def notice(rank: int, times: UpdateTimes, **gauges: float) -> RankNotice:
    return RankNotice(rank, "a", 1, 0.0, times.measured, Phase.FORWARD, 0.5, times, gauges)


def report(*times: UpdateTimes, seconds: float = 10.0) -> MeterReport:
    ranks = [RankInterval.between(None, notice(rank, of_rank)) for rank, of_rank in enumerate(times)]
    return MeterReport(10, seconds, tuple(ranks))


numbers = st.floats(0, 1e9)


@given(st.dictionaries(st.integers(-700, 700), st.integers(1, 9)), st.lists(numbers, min_size=8, max_size=8), numbers)
def test_a_notice_arrives_as_it_was_posted(bins: dict[int, int], split: list[float], value: float) -> None:
    durations = Durations(Counter(bins), sum(bins.values()), value, 0.1, value)
    sent = RankNotice(3, "höst", 7, 1.5, 9, Phase.SAVE, value, UpdateTimes(durations, split, 4, value), {"x": value})
    assert RankNotice.decode(sent.encode()) == sent


def test_a_rank_that_has_made_no_update_can_post() -> None:
    meters = RankMeters(PhaseClock(), NoticeBoard(None, 0, 1), 0, lambda: 0)
    read = RankNotice.decode(meters.notice().encode())
    interval = RankInterval.between(None, read)
    assert interval.updates == 0
    assert math.isnan(interval.seconds)
    assert MeterReport(0, 1.0, (interval,)).stragglers() == []


def test_what_befell_a_gpu_as_its_rank_ended_is_in_the_ranks_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its last notice may not be read: the rank that collects them ends, too."""

    class Ended(NoticeBoard):
        def post(self, data: bytes) -> None:
            raise RuntimeError("the store has ended")

    readings = iter([{"gpu_xid_errors": 1.0, "gpu_last_xid": 13.0}, {"gpu_xid_errors": 2.0, "gpu_last_xid": 79.0}])
    thread = RankMeters(PhaseClock(), Ended(None, 0, 1), 3, lambda: 9, [lambda: next(readings)])
    thread.start()
    thread.finish()
    host = socket.gethostname()
    text = f"GPU of rank 3 on {host}: Xid error 79 (https://docs.nvidia.com/deploy/xid-errors), number 2 of this run"
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_gauge_that_fails_is_left_out_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("no such device")

    meters = RankMeters(PhaseClock(), NoticeBoard(None, 0, 1), 0, lambda: 0, [broken, lambda: {"heat": 60.0}])
    assert meters.notice().gauges == meters.notice().gauges == {"heat": 60.0}
    assert caplog.text.count("are missing from now on: RuntimeError('no such device')") == 1


def test_a_gauge_whose_file_is_gone_for_a_while_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "size"
    meters = RankMeters(
        PhaseClock(), NoticeBoard(None, 0, 1), 0, lambda: 0, [lambda: {"size": float(file.read_text())}]
    )
    assert meters.notice().gauges == meters.notice().gauges == {}
    assert "are missing" not in caplog.text
    file.write_text("3")
    assert meters.notice().gauges == {"size": 3.0}


@pytest.mark.parametrize(
    ("slow", "phase"),
    [
        ({"DATA": 0.5, "FORWARD": 1.0}, "data"),
        ({"DATA": 0.1, "FORWARD": 1.4}, "forward"),
        ({"DATA": 0.1, "FORWARD": 1.0, "HOST": 0.4}, "host"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_with_what_it_does(slow: dict[str, float], phase: str) -> None:
    usual = times_of(5, DATA=0.1, FORWARD=1.0, COMMUNICATION=0.4)
    stragglers = report(usual, times_of(5, **slow), usual).stragglers()
    assert [(straggler.rank, straggler.phase) for straggler in stragglers] == [(1, phase)]
    assert stragglers[0].ratio == pytest.approx(sum(slow.values()) / 1.1)
    assert report(usual, times_of(5, **slow), usual, seconds=0.3).stragglers() == []


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_that_are_equal_or_nearly_so_have_no_straggler(ranks: int) -> None:
    times = [times_of(5, FORWARD=1.0 + 0.03 * rank, COMMUNICATION=0.2 - 0.03 * rank) for rank in range(ranks)]
    assert report(*times).stragglers() == []


def test_a_rank_that_hung_once_is_no_straggler() -> None:
    def of(*updates: tuple[float, float]) -> UpdateTimes:
        times = UpdateTimes()
        for forward, communication in updates:
            times.merge(times_of(1, FORWARD=forward, COMMUNICATION=communication))
        return times

    waits, hangs = of(*[(0.1, 0.0)] * 50, (0.1, 20.0)), of(*[(0.1, 0.0)] * 50, (20.1, 0.0))
    assert report(waits, hangs, waits).stragglers() == []
    often = of(*[(0.1, 0.0), (0.4, 0.0)] * 25)
    assert [each.rank for each in report(of(*[(0.1, 0.0), (0.1, 0.3)] * 25), often).stragglers()] == [1]


def test_a_rank_that_waits_more_is_no_straggler() -> None:
    assert report(times_of(3, FORWARD=1.0), times_of(3, FORWARD=0.5, COMMUNICATION=0.5)).stragglers()[0].rank == 0


def test_values_for_curves_are_over_all_ranks() -> None:
    first, second = times_of(2, FORWARD=1.0, COMMUNICATION=1.0), times_of(2, FORWARD=2.0)
    ranks = [
        RankInterval.between(None, notice(0, first, memory=1.0)),
        RankInterval.between(None, notice(1, second, memory=5.0)),
    ]
    values = meter_values(MeterReport(2, 10.0, tuple(ranks)))
    assert values["time/forward_seconds"] == 1.5
    assert values["ranks/step_seconds"] == 2.0
    assert (values["memory/min"], values["memory/mean"], values["memory/max"]) == (1.0, 3.0, 5.0)


def test_a_line_an_interval_and_the_state_of_now_are_written(tmp_path: Path) -> None:
    board = NoticeBoard(None, 0, 1)
    files = MeterFiles(tmp_path, board, interval=0.0, ranks=1)
    shown: list[MeterReport] = []
    files.show = shown.append
    files.look()
    assert not (tmp_path / RANKS).exists()
    times = times_of(2, FORWARD=1.0)
    board.post(notice(0, times, memory=7.0).encode())
    files.look(last=True)
    times.merge(times_of(3, FORWARD=2.0))
    board.post(notice(0, times, memory=8.0).encode())
    files.look(last=True)
    live = json.loads((tmp_path / LIVE).read_text())
    assert live["ranks"][0]["phase"] == "forward"
    assert live["ranks"][0]["step_seconds"] == 2.0
    files.close()
    assert not (tmp_path / LIVE).exists()
    lines = [json.loads(text) for text in (tmp_path / RANKS).read_text().splitlines()]
    assert [(line["step"], line["updates"], line["step_seconds"]) for line in lines] == [
        (2, [2], [1.0]),
        (5, [3], [2.0]),
    ]
    assert lines[1]["split"]["forward"] == [2.0]
    assert lines[1]["gauges"] == {"memory": [8.0]}
    assert [each.step for each in shown] == [2, 5]


def test_the_thread_posts_the_last_state_and_ends_whether_or_not_the_disk_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, board = PhaseClock(), NoticeBoard(None, 0, 1)
    files = MeterFiles(tmp_path / "missing" / "folder", board, interval=0.0, ranks=1)
    shown: list[MeterReport] = []
    files.show = shown.append
    (tmp_path / "missing").write_text("a file where the folder should be")
    thread = RankMeters(clock, board, 0, lambda: 1, files=files, seconds=0.01)
    thread.start()
    for _ in range(3):
        clock.updated()
    thread.finish()
    assert shown[-1].ranks[0].notice.times.durations.count == 2
    assert "the run continues without" in caplog.text
