from __future__ import annotations

import gc
import re
import time
import weakref
from multiprocessing import get_context

import pytest
from kit.failures import gives

from lockstep.core.control_groups import Kills, why_killed
from lockstep.core.errors import CollectiveTimeout, ConfigError, Paused, RunFailed, Stopped
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import PHASE, shared_heartbeat
from lockstep.core.phase_clock import Phase
from lockstep.launch.ends import (
    End,
    describe,
    end_fields,
    end_of_exception,
    end_of_fields,
    end_of_process,
    end_of_return,
    first_cause,
    with_cause,
)
from lockstep.launch.outcome import LaunchResult
from lockstep.launch.rank import run_entry
from lockstep.launch.worker_group import RankProcess

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41938"


def _end(kind: FailureKind, time: float = 0.0, text: str = "") -> End:
    return End(kind, text, time)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConfigError("lr is 0"), FailureKind.CONFIG, 2),
        (RunFailed("no disk"), FailureKind.FAILED, 1),
        (CollectiveTimeout("for rank 1"), FailureKind.TIMED_OUT, 1),
        (Stopped("time is up"), FailureKind.STOPPED, 130),
        (Paused("time is up"), FailureKind.PAUSED, 75),
        (KeyboardInterrupt(), FailureKind.STOPPED, 130),
        (SystemExit(), FailureKind.EXITED, 1),
        (SystemExit(4), FailureKind.EXITED, 1),
        (SystemExit(75), FailureKind.EXITED, 1),  # nothing was saved: no scheduler may start it again for ever
        (SystemExit("enough"), FailureKind.FAILED, 1),
        (ValueError("boom"), FailureKind.EXCEPTION, 1),
        (RuntimeError(GLOO), FailureKind.PEER_FAILED, 1),
        (ConnectionResetError("Connection reset by peer"), FailureKind.PEER_FAILED, 1),
        (ValueError("Connection closed by peer"), FailureKind.EXCEPTION, 1),  # no network raises this type
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_the_kind_of_end_of_an_exception(error: BaseException, kind: FailureKind, code: int) -> None:
    end = end_of_exception(error, 0.0, None)
    assert (end.kind, end.kind.exit_code) == (kind, code)


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind.exit_code])
def test_the_exception_of_a_launch_has_the_exit_code_of_its_kind(kind: FailureKind) -> None:
    failure = LaunchResult(kind, "no disk").failure()
    assert (failure.kind, failure.exit_code) == (kind, kind.exit_code)


def test_a_keyboard_interrupt_of_the_program_has_its_place() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        raise KeyboardInterrupt
    end = end_of_exception(caught.value, 0.0, None)
    assert re.search(r"KeyboardInterrupt in .*test_ends\.py:\d+$", end.text)


def test_an_exception_caused_by_a_broken_connection_is_a_peer_failure() -> None:
    error = ValueError("step 4 failed")
    error.__cause__ = RuntimeError(GLOO)
    assert end_of_exception(error, 0.0, None).kind is FailureKind.PEER_FAILED


@pytest.mark.parametrize(
    ("exitcode", "kind", "text"),
    [
        (0, FailureKind.EXITED, "ended with exit code 0 before it was done"),
        (75, FailureKind.EXITED, "ended with exit code 75 before it was done"),
        (2, FailureKind.EXITED, "ended with exit code 2"),
        (3, FailureKind.EXITED, "ended with exit code 3"),
        (124, FailureKind.EXITED, "ended with exit code 124"),
        (130, FailureKind.EXITED, "ended with exit code 130 before it was done"),
        (-9, FailureKind.KILLED, "was killed by SIGKILL"),
        (-11, FailureKind.CRASHED, "was killed by SIGSEGV"),
        (-6, FailureKind.PEER_FAILED, "was killed by SIGABRT"),
        (-99, FailureKind.CRASHED, "was killed by signal 99"),
    ],
)
def test_the_end_of_a_process_without_a_report(exitcode: int, kind: FailureKind, text: str) -> None:
    end = end_of_process(exitcode, 0.0)
    assert (end.kind, end.text, end.kind.exit_code) == (kind, text, 1)


def test_a_process_that_was_asked_to_stop_has_stopped() -> None:
    assert end_of_process(130, 0.0, stopping=True).kind is FailureKind.STOPPED
    assert end_of_process(3, 0.0, stopping=True).kind is FailureKind.EXITED


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([_end(FailureKind.DONE), _end(FailureKind.DONE)], None),
        ([_end(FailureKind.PEER_FAILED, 1), _end(FailureKind.KILLED, 2)], 1),
        ([_end(FailureKind.EXITED, 1), _end(FailureKind.EXITED, 2)], 0),
        ([_end(FailureKind.DONE, 1), _end(FailureKind.EXITED, 2)], 1),
        ([_end(FailureKind.ENDED, 1), _end(FailureKind.PEER_FAILED, 2), _end(FailureKind.EXCEPTION, 3)], 2),
        ([_end(FailureKind.EXCEPTION, 2), _end(FailureKind.FAILED, 1)], 1),
        ([_end(FailureKind.PEER_FAILED, 2), _end(FailureKind.PEER_FAILED, 1)], 1),
        ([_end(FailureKind.ENDED, 1), _end(FailureKind.PEER_FAILED, 2)], 1),
        ([_end(FailureKind.PEER_FAILED, 1), _end(FailureKind.TIMED_OUT, 2), _end(FailureKind.ENDED, 3)], 1),
        ([_end(FailureKind.TIMED_OUT, 1), _end(FailureKind.KILLED, 2)], 1),
        ([_end(FailureKind.PEER_FAILED, 1), _end(FailureKind.STOPPED, 2)], 1),
        ([_end(FailureKind.DONE, 1), _end(FailureKind.ENDED, 2)], 1),
    ],
)
def test_first_cause_by_kind_then_by_time(ends: list[End], cause: int | None) -> None:
    assert first_cause(ends) == cause


def test_a_message_of_all_ranks_names_no_rank() -> None:
    ends = [end_of_exception(ConfigError("lr is 0"), 0.0, None)] * 2
    assert describe(0, ends, 600.0) == "lr is 0"
    assert describe(0, [ends[0], end_of_return(0, 0.0)], 600.0) == f"rank 0: {ends[0].text}"


def test_ranks_that_were_ended_kept_others_waiting_and_late_ones_only_if_none_was_ended() -> None:
    waited, early, late = (
        _end(FailureKind.TIMED_OUT, 1),
        _end(FailureKind.PEER_FAILED, 1.1),
        _end(FailureKind.PEER_FAILED, 9),
    )
    ended = _end(FailureKind.ENDED, 9)
    assert gives(describe(0, [waited, early, late], 600.0), "rank 2", "600 s", "launch.timeout")
    assert gives(describe(0, [waited, ended, late], 600.0), "rank 1", "600 s", "launch.timeout")
    assert describe(0, [waited, early, early], 600.0).startswith("no rank hangs")
    assert gives(describe(0, [waited, *[ended] * 11], 600.0), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more", "600 s")


def test_objects_of_a_failed_entry_are_freed_at_once() -> None:
    """Garbage collection would be too late: a data loader's workers would no longer be ended."""
    held: list[weakref.ref[set[int]]] = []

    def entry() -> int:
        workers = {1, 2}
        held.append(weakref.ref(workers))
        raise ValueError("boom")

    gc.disable()
    try:
        assert run_entry(entry).kind is FailureKind.EXCEPTION
        assert held[0]() is None
    finally:
        gc.enable()


def test_long_tracebacks_lose_their_middle() -> None:
    text = end_of_exception(ValueError("x" * 100_000 + "the end"), 0.0, None).text
    assert len(text) < 13_000
    assert text.startswith("ValueError: xxx")
    assert text.endswith("the end")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (Kills(0, 3), Kills(1, 4), "out of memory (the kernel's OOM killer, in this control group). Do less."),
        (
            Kills(1, 3),
            Kills(1, 4),
            "out of memory (the kernel's OOM killer was at work on this machine meanwhile). Do less.",
        ),
        (
            Kills(None, 3),
            Kills(None, 3),
            "by a person or a scheduler; the kernel has counted no out-of-memory kill here",
        ),
        (Kills(None, None), Kills(None, None), "out of memory, perhaps (the kernel's log, dmesg, would show it)"),
    ],
)
def test_the_cause_of_sigkill_follows_from_the_kernels_counts(before: Kills, now: Kills, expected: str) -> None:
    killed = with_cause(
        End(FailureKind.KILLED, "was killed by SIGKILL", 0.0), lambda: why_killed(before, now, lambda: "Do less.")
    )
    ends = [End(FailureKind.ENDED, "", 1.0), killed]
    assert describe(1, ends, 600.0) == f"rank 1 was killed by SIGKILL: {expected}"
    assert killed.kind is (FailureKind.HOST_MEMORY if "Do less" in expected else FailureKind.KILLED)


def test_the_cause_of_a_failure_is_only_in_the_log() -> None:
    def fail() -> int:
        try:
            raise ValueError("no such image")
        except ValueError as error:
            raise RunFailed("sample 5 can't be read") from error

    end = run_entry(fail)
    assert end.text == "sample 5 can't be read"
    assert "Traceback" in end.detail
    assert end.detail.endswith("ValueError: no such image")


@pytest.mark.parametrize(("phase", "evaluates"), [(Phase.EVALUATION, True), (Phase.FORWARD, False)])
def test_a_rank_that_is_killed_in_an_evaluation(phase: Phase, evaluates: bool) -> None:
    beat = shared_heartbeat()
    context = get_context("spawn")
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    rank = RankProcess(process, context.Pipe()[0], beat)
    beat.numbers[PHASE] = phase
    process.kill()
    process.join()
    rank.update()
    assert rank.ended is not None
    assert (rank.ended.kind, rank.ended.evaluates) == (FailureKind.KILLED, evaluates)
    assert end_of_fields(end_fields(rank.ended)).evaluates == evaluates
    beat.close()
