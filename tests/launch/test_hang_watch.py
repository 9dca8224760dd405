"""The watch over ranks: who is named and killed, who isn't. Ranks are forked from the test, and beat as real ones."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kit.failures import gives

from lockstep.config.training_sections import Watchdog
from lockstep.core import heartbeat
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import Stage
from lockstep.core.phase_clock import Phase, PhaseClock
from lockstep.core.stopping import STACKS_SIGNAL
from lockstep.launch import rank_stacks
from lockstep.launch.ends import End
from lockstep.launch.hang_watch import Hang, HangWatch, LearnedTimes, Sight, hang_text
from lockstep.launch.rank_stacks import Frame, line_of, main_frames, waits_in_collective
from lockstep.sharding.single import run_backward

Act = Callable[[PhaseClock], None]
QUICK = Watchdog(least=0.25, end_after=0.6)


STACKS = """Thread 0x1 (most recent call first):
  File "/b.py", line 1 in run

Current thread 0x2 (most recent call first):
  File "/x/site-packages/torch/nn/functional.py", line 5 in linear
  File "/my/model.py", line 33 in forward
  File "/y/rank.py", line 9 in run_rank
  File "/my/start.py", line 1 in <module>"""


class Member:
    """What the watch sees and does of a rank's process."""

    def __init__(self, process: int) -> None:
        self.process = SimpleNamespace(pid=process)
        self.ended = self.reported = None
        self.end: End | None = None

    def kill_hung(self, end: End) -> None:
        self.end = self.reported = end  # type: ignore[assignment]


def sleep_in(file: str, seconds: float = 60.0) -> None:
    """Sleep in a function of another file."""
    names: dict[str, Callable[[float], None]] = {}
    exec(compile("import time\ndef call(seconds):\n    time.sleep(seconds)", file, "exec"), names)
    names["call"](seconds)


def updates(clock: PhaseClock, number: int = 8) -> None:
    for _ in range(number):
        clock.enter(Phase.FORWARD)
        time.sleep(0.005)
        clock.updated()


def waits(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.COMMUNICATION)
    sleep_in("/x/torch/distributed/distributed_c10d.py")


def waits_for_a_while(clock: PhaseClock) -> None:
    """Wait in a collective, and then elsewhere, as in the copy of a snapshot."""
    updates(clock)
    clock.enter(Phase.COMMUNICATION)
    sleep_in("/x/torch/distributed/distributed_c10d.py", 0.5)
    clock.enter(Phase.SAVE)
    time.sleep(60)


def hangs(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.FORWARD)
    while True:
        time.sleep(0.01)


def hangs_as_collective(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.COMMUNICATION)
    time.sleep(60)


def holds_interpreter(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.DATA)
    while True:
        ctypes.PyDLL(None).sleep(60)


def reads_until_a_signal(clock: PhaseClock) -> None:
    """Read a sample in C, in a wait that a signal ends, then the next ones, between two updates by its clock."""
    updates(clock)
    clock.enter(Phase.HOST)
    for sample in (34, 35, *range(100, 10_000)):
        with heartbeat.reads(np.array([sample]), evaluates=False):
            if sample == 34:
                ctypes.PyDLL(None).sleep(60)


def is_stopped(clock: PhaseClock) -> None:
    """Be stopped until it is let continue, and stay where it is then."""
    updates(clock)
    clock.enter(Phase.BACKWARD)
    os.kill(os.getpid(), signal.SIGSTOP)
    hangs(clock)


def compiles(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.FORWARD)
    sleep_in("/x/torch/_inductor/compile_fx.py")


def is_debugged(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.FORWARD)
    sleep_in("/x/lib/python3/pdb.py")


def evaluates(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.EVALUATION)
    time.sleep(60)


def records(*collectives: str) -> Act:
    """Waits for a device in the user's code, and has a flight record of what isn't complete."""

    def act(clock: PhaseClock) -> None:
        rank_stacks._record = lambda: (list(collectives), bool(collectives), b"the record")  # type: ignore[assignment]
        updates(clock)
        clock.enter(Phase.OPTIMIZER)
        time.sleep(60)

    return act


def begins(clock: PhaseClock) -> None:
    heartbeat.begin_stage(Stage.START)
    time.sleep(60)


def makes_its_first_update(clock: PhaseClock) -> None:
    clock.enter(Phase.FORWARD)
    time.sleep(60)


def pauses(clock: PhaseClock) -> None:
    updates(clock)
    clock.enter(Phase.FORWARD)
    time.sleep(0.45)
    clock.updated()
    for _ in range(2000):
        clock.enter(Phase.FORWARD)
        time.sleep(0.01)
        clock.updated()


@contextmanager
def watched(
    folder: Path,
    *acts: Act,
    options: Watchdog = QUICK,
    alone: bool = True,
    times: LearnedTimes | None = None,
) -> Iterator[tuple[HangWatch, list[Member]]]:
    """Yield the watch over ranks that perform acts."""
    beats = [heartbeat.shared_heartbeat() for _ in acts]
    watch = HangWatch(options, beats, folder, 0, alone=alone, times=times or LearnedTimes())
    watch.interval = 0.02
    members = []
    with closing(watch):
        try:
            for place, act in enumerate(acts):
                process = os.fork()
                if process == 0:
                    run_rank(watch.heartbeats[place], act)
                members.append(Member(process))
            yield watch, members
        finally:
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid, signal.SIGKILL)
                os.waitpid(member.process.pid, 0)


def run_rank(beats: heartbeat.Heartbeat, act: Act) -> None:
    try:
        rank_stacks.answer_requests(beats)
        heartbeat.use(beats)
        heartbeat.begin_stage(Stage.TRAINING)
        act(PhaseClock())
    finally:
        os._exit(1)


def look(watch: HangWatch, members: list[Member], seconds: float) -> float:
    """Look until a rank is killed, for some seconds; return how long that took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds and not any(member.end for member in members):
        watch.look(members)  # type: ignore[arg-type]
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (hangs, "rank 1 hangs in the forward at tests/launch/test_hang_watch.py"),
        (hangs_as_collective, "rank 1 hangs in a collective at tests/launch/test_hang_watch.py"),
        (holds_interpreter, "in holds_interpreter (update 9)"),
        (is_stopped, "rank 1 hangs in the forward at tests/launch/test_hang_watch.py"),
    ],
)
def test_the_rank_that_hangs_is_named_and_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], act: Act, text: str
) -> None:
    with watched(tmp_path, waits, act, waits) as (watch, members):
        took = look(watch, members, 5.0)
    assert [member.end is not None for member in members] == [False, True, False]
    end = members[1].end
    assert end is not None
    assert text in end.text
    assert end.kind is FailureKind.HUNG
    assert took < 3.0
    assert "lockstep: rank 1 " in capfd.readouterr().err
    report = (tmp_path / "hangs.txt").read_text()
    assert "--- rank 0" in report
    assert "distributed_c10d.py" in report


def test_the_sample_is_named_whose_reading_the_request_for_a_stack_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with watched(tmp_path, waits, reads_until_a_signal, waits) as (watch, members):
        look(watch, members, 1.0)
    named = capfd.readouterr().err.splitlines()[0]
    assert "rank 1 hangs" in named
    assert "fetching data at tests/launch/test_hang_watch.py" in named
    assert "(update 9, sample 34)" in named
    assert "(update 9, sample 34)" in (tmp_path / "hangs.txt").read_text().splitlines()[0]


def hangs_beside_a_thread(clock: PhaseClock) -> None:
    def sleeps_beside_it() -> None:
        time.sleep(60)

    threading.Thread(target=sleeps_beside_it, daemon=True).start()
    hangs(clock)


def test_a_main_thread_writes_no_stack_of_threads_that_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write their own, each while it has the interpreter's lock: a stack that is read without it can crash."""
    monkeypatch.setattr(rank_stacks, "_RECORD_S", 5.0)
    with watched(tmp_path, waits, hangs_beside_a_thread) as (watch, members):
        look(watch, members, 5.0)
        file = watch.heartbeats[1].files.stacks
        by_signal = os.pread(file, os.fstat(file).st_size, 0).decode()
    assert " in hangs\n" in by_signal
    assert "sleeps_beside_it" not in by_signal
    report = (tmp_path / "hangs.txt").read_text()
    assert report.index(" in hangs\n") < report.index(" in sleeps_beside_it\n")


def hears_no_signal(clock: PhaseClock) -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])  # as while it waits in the kernel for a disk
    hangs(clock)


def test_no_other_thread_writes_its_stack_for_the_main_one(tmp_path: Path) -> None:
    with watched(tmp_path, waits, hears_no_signal) as (watch, members):
        look(watch, members, 2.0)
        assert members[1].end is not None
        assert os.fstat(watch.heartbeats[1].files.stacks).st_size == 0


@pytest.mark.parametrize("act", [compiles, is_debugged, evaluates, begins, makes_its_first_update])
def test_what_may_take_long_is_neither_named_nor_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], act: Act
) -> None:
    with watched(tmp_path, waits, act) as (watch, members):
        look(watch, members, 1.0)
    assert not any(member.end for member in members)
    assert capfd.readouterr().err == ""


def test_the_first_update_of_a_later_round_has_the_limit_of_the_rounds_before(tmp_path: Path) -> None:
    with watched(tmp_path, waits, makes_its_first_update, times=LearnedTimes(first=0.05)) as (watch, members):
        look(watch, members, 1.5)
        assert members[1].end is not None
        assert gives(members[1].end.text, "rank 1 hangs", "forward")


@pytest.mark.parametrize("seconds", [0.3, None])
def test_a_start_that_hangs_is_ended_by_its_own_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], seconds: float | None
) -> None:
    options = Watchdog(least=0.2, end_after=0.2, other=0.3, end_start_after=seconds)
    with watched(tmp_path, waits, begins, options=options) as (watch, members):
        look(watch, members, 2.0)
    assert "rank 1 hangs" in capfd.readouterr().err
    assert members[0].end is None
    if seconds is None:
        assert members[1].end is None
    else:
        assert members[1].end is not None
        assert members[1].end.kind is FailureKind.HUNG
        assert gives(members[1].end.text, "rank 1 hangs", "start")


def test_what_may_take_long_is_named_in_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A compilation is killed `end_after` later, which counts from there."""
    with watched(tmp_path, waits, compiles, options=Watchdog(least=0.2, end_after=0.5, other=0.6)) as (watch, members):
        look(watch, members, 3.0)
        lines = (tmp_path / "hangs.txt").read_text().splitlines()
    assert members[1].end is not None
    assert "rank 1 hangs" in capfd.readouterr().err
    named, killed = [float(re.findall(r"for ([\d.]+) s;", line)[0]) for line in lines if line.startswith("--- rank 1")]
    assert killed - named >= 0.4


def test_a_rank_that_moves_again_is_not_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with watched(tmp_path, waits, pauses) as (watch, members):
        look(watch, members, 1.2)
        assert not any(member.end for member in members)
    err = capfd.readouterr().err
    assert "rank 1 hangs" in err
    assert gives(err, "rank 1 moves again")


def test_a_rank_does_not_move_because_another_one_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with watched(tmp_path, waits_for_a_while, hangs, options=Watchdog(least=0.25, end_after=None)) as (watch, members):
        look(watch, members, 1.5)
    err = capfd.readouterr().err
    assert "no move for 0." in err
    assert "moves again" not in err


@pytest.mark.parametrize(
    ("collectives", "odd", "text"),
    [
        (
            [["all_reduce 17"], ["broadcast 17"], ["all_reduce 17"]], 1,
            "collectives that don't match: ranks 0 and 2 in all_reduce 17 at tests/launch/test_hang_watch.py",
        ),
        ([["all_reduce 7, started,"], ["all_reduce 7"], ["all_reduce 7, started,"]], 1, "rank 1 in all_reduce 7 at "),
        ([["all_reduce 17"], ["all_reduce 17"], []], 2, "rank 2 hangs in the optimizer's step at "),
    ],
    ids=["another collective", "a device that hasn't started it", "a rank whose device waits for nothing"],
)  # fmt: skip
def test_the_flight_records_of_devices(
    tmp_path: Path, collectives: Sequence[Sequence[str]], odd: int, text: str
) -> None:
    with watched(tmp_path, *(records(*each) for each in collectives)) as (watch, members):
        watch.heartbeats[odd].numbers[heartbeat.CALLS] = 0 if collectives[odd] else -1
        for place in set(range(3)) - {odd} if collectives[odd] else ():
            watch.heartbeats[place].numbers[heartbeat.CALLS] = -2  # the host of the odd one is ahead: it doesn't decide
        look(watch, members, 5.0)
    ((rank, end),) = [(rank, member.end) for rank, member in enumerate(members) if member.end is not None]
    assert rank == odd
    assert text in end.text
    report = (tmp_path / "hangs.txt").read_text()
    assert report.count("not complete: ") == 2 * sum(map(bool, collectives)), "named, and killed"
    assert [path.read_bytes() for path in sorted((tmp_path / "flight_record").iterdir())] == [b"the record"] * 3


def test_beside_other_hosts_a_rank_hangs_that_is_in_no_collective_by_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.hang_watch._ELSEWHERE_S", 0.6)
    with watched(tmp_path, hangs_as_collective, alone=False) as (watch, members):
        look(watch, members, 3.0)
        assert members[0].end is not None
        assert gives(members[0].end.text, "rank 0 hangs", "collective")
    with watched(tmp_path, waits, alone=False) as (watch, members):
        look(watch, members, 2.0)
        assert members[0].end is None, "it may wait for a rank of another host"
    err = capfd.readouterr().err
    assert err.count("other hosts") == 1
    assert gives(err, "other hosts", "rank 0", "collective")


def test_time_in_which_the_launcher_was_stopped_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.hang_watch._GAP_S", 0.2)
    with watched(tmp_path, waits, hangs, options=Watchdog(least=1.0, end_after=2.0)) as (watch, members):
        look(watch, members, 0.2)
        time.sleep(1.5)
        look(watch, members, 0.5)
        assert watch.interval < 1.0
        assert capfd.readouterr().err == ""
        look(watch, members, 0.9)
        assert watch.has_named
        time.sleep(0.5)
        look(watch, members, 5.0)
    assert members[1].end is not None
    assert capfd.readouterr().err.count("rank 1") == 1, "a rank that was named stays named"


def sight(rank: int = 0, phase: Phase = Phase.FORWARD) -> Sight:
    return Sight(rank, rank, 9, 1.0, 3.0, phase, Stage.TRAINING, waits=False, state="S", step=1, updates=3, calls=0)


@pytest.mark.parametrize(("is_stopped", "how"), [(False, "hang"), (True, "hang, stopped by SIGSTOP,")])
def test_several_ranks_that_hang(is_stopped: bool, how: str) -> None:
    hang = Hang((sight(1), sight(2)), {}, {}, is_stopped)
    assert gives(hang_text(hang), "ranks 1 and 2", how, "forward", "update 1")


def test_a_rank_that_waits_for_its_accelerator_is_named_so() -> None:
    """A kernel that doesn't end shows where the host reads its results."""
    stack = f"""Current thread 0x2 (most recent call first):
  File "/x/site-packages/torch/cuda/streams.py", line 231 in synchronize
  File "{rank_stacks._OWN}loop/readback.py", line 171 in land"""
    text = hang_text(Hang((sight(phase=Phase.HOST),), {9: stack}, {}))
    where = "lockstep/loop/readback.py:171 in land"
    assert gives(text, "rank 0", "between two updates", "accelerator", where, "update 1")


def test_without_an_end_a_hang_is_only_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with watched(tmp_path, waits, is_stopped, options=Watchdog(least=0.2, end_after=None)) as (watch, members):
        look(watch, members, 0.8)
    assert not any(member.end for member in members)
    assert gives(capfd.readouterr().err, "rank 1 hangs", "SIGSTOP")


def test_a_backward_that_waits_for_other_ranks_shows_only_who_called_autograd() -> None:
    innermost = Frame(run_backward.__code__.co_filename, 30, run_backward.__name__)
    assert waits_in_collective([innermost], marked=True)
    assert not waits_in_collective([innermost], marked=False)


def test_the_line_of_a_stack() -> None:
    frames = main_frames(STACKS)
    assert [frame.function for frame in frames] == ["linear", "forward"]
    assert line_of(frames) == Frame("/my/model.py", 33, "forward")
    assert not waits_in_collective(frames, marked=False)
    assert waits_in_collective(frames, marked=True)
    assert line_of(main_frames("")) is None
