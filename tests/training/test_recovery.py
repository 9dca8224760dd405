"""Ranks that fail are started again by their launcher, and the run ends where the undisturbed one does."""

from __future__ import annotations

import json
import pickle
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.commands import Done, run_lockstep, start_lockstep
from kit.failures import gives
from safetensors.torch import load_file

from lockstep.config.training_sections import Budgets, Recovery
from lockstep.core.control_groups import WhyKilled
from lockstep.core.errors import ConfigError, OutOfMemory, UnusableSamples, WorkerDied
from lockstep.core.failure_kinds import FailureKind, Retry
from lockstep.doctor.run import diagnose_run
from lockstep.launch.ends import End, end_of_exception, end_of_process, with_cause
from lockstep.launch.ends_file import read_ends
from lockstep.launch.outcome import LaunchResult
from lockstep.launch.supervision import Supervisor
from lockstep.monitor.attempts import read_attempts

MODEL = f"{Path(__file__).parent / 'failing_models.py'}:Failing"


def train(folder: Path, restarts: int, arguments: dict[str, Any], *words: str) -> Done:
    return run_lockstep("train", written(folder, restarts, arguments), *words)


def written(folder: Path, restarts: int, arguments: dict[str, Any]) -> Path:
    config = small.config(
        run={"steps": 12, "folder": str(folder)},
        parallel={"strategy": "ddp"},
        launch={"ranks": 2},
        recovery={"restarts": restarts, "watchdog": {"least": 0.5, "end_after": 1.0}},
        checkpoint={"every": "4 steps"},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0},
    )
    file = folder.parent / f"{folder.name}.yaml"
    model = {"kind": "custom", "target": MODEL, "arguments": arguments}
    file.write_text(yaml.safe_dump({**config, "model": model}))
    return file


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(folder, 0, {"how": "kill", "at": 100}).returncode == 0
    return folder


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("how", ["kill", "exit", "raise", "hang"])
def test_a_rank_that_fails_once(tmp_path: Path, undisturbed: Path, how: str) -> None:
    folder = tmp_path / "run"
    done = train(folder, 1, {"how": how, "at": 7, "once": str(tmp_path / "once")})
    assert done.returncode == 0, done.stderr
    assert "its ranks start again, from the newest state" in done.stderr
    assert done.stdout.count("  strategy ") == 1, "the run is described once"
    assert how != "raise" or re.search(
        r"lockstep: rank 1 failed: .* \(at .*failing_models\.py:\d+ in \w+\)", done.stderr
    )
    assert [ends.kind is FailureKind.DONE for ends in read_ends(folder / "logs")] == [False, True]
    assert losses(folder) == losses(undisturbed)
    first, second = read_attempts(folder)
    assert first.launched < first.began <= second.launched < second.began
    weights, expected = (load_file(run / "model" / "model.safetensors") for run in (folder, undisturbed))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items() if name != "updates")


@pytest.mark.parametrize(
    ("how", "rounds", "text"),
    [("kill", 3, "had been started again 2 times"), ("raise", 2, "had been started again 1 time")],
)
def test_a_rank_that_always_fails_ends_the_run(tmp_path: Path, how: str, rounds: int, text: str) -> None:
    done = train(tmp_path / "run", 2, {"how": how, "at": 7})
    assert done.returncode == 1
    assert text in done.stderr
    assert len(read_ends(tmp_path / "run" / "logs")) == rounds


def test_without_restarts_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path / "run", 0, {"how": "kill", "at": 7})
    assert done.returncode == 1
    assert "start again" not in done.stderr


def test_a_stopped_rank_is_let_continue(tmp_path: Path, undisturbed: Path) -> None:
    done = train(tmp_path / "run", 0, {"how": "stop", "at": 7})
    assert done.returncode == 0, done.stderr
    assert gives(done.stderr, "rank 1", "SIGSTOP", "forward", "update 7")
    assert "it gets SIGCONT" in done.stderr
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    done = train(tmp_path / "run", 0, {"how": "hang", "at": 7})
    assert done.returncode == 124
    assert re.search(r"rank 1 .*failing_models\.py:\d+ in forward \(update 7\)", done.stderr)
    (ends,) = read_ends(tmp_path / "run" / "logs")
    assert (ends.cause, ends.ranks[1].kind, ends.kind) == (1, FailureKind.HUNG, FailureKind.HUNG)
    assert "--- rank 0" in (tmp_path / "run" / "logs" / "hangs.txt").read_text()


@pytest.mark.drill
def test_the_last_evaluation_has_the_limits_of_the_others(tmp_path: Path, undisturbed: Path) -> None:
    """A rank that hangs in it is killed after four times `other`, long before what may take long at the end."""
    arguments = {"how": "hang in an evaluation", "at": 12, "once": str(tmp_path / "once")}
    limits = "--recovery.watchdog={least: 0.5, end_after: 1.0, other: 1.0}"
    done = train(tmp_path / "run", 1, arguments, limits)
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 1 .* evaluation .*failing_models\.py:\d+ in forward", done.stderr)
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_run_in_which_a_rank_hangs_stops_soon_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = written(folder, 0, {"how": "hang", "at": 7})
    limits = "--recovery.watchdog={least: 0.5, end_after: null}"
    words = [limits, "--launch.timeout=600", "--recovery.snapshot_every=1"]
    running = start_lockstep("train", file, *words, cwd=tmp_path)
    running.wait_for(lambda: "rank 1 hangs" in running.output)
    began = time.monotonic()
    running.send(signal.SIGTERM)
    assert running.end() == 75
    assert time.monotonic() - began < 60.0  # and not launch.timeout
    assert gives(running.output, "step 6", "saved", folder / "checkpoints")
    assert diagnose_run(folder).resume


def test_a_run_that_gets_further_each_time_goes_on() -> None:
    assert rounds_of([(FailureKind.KILLED, step) for step in (10, 20, 30, 40)], restarts=1) == 5
    assert rounds_of([(FailureKind.KILLED, step) for step in (10, 20, 20, 20)], restarts=1) == 3
    assert rounds_of([(FailureKind.KILLED, step) for step in (10, 20, 20, 30, 30)], restarts=2) == 6


@pytest.mark.parametrize("kind", [FailureKind.FAILED, FailureKind.PAUSED, FailureKind.INTERRUPTED])
def test_ends_after_which_no_rank_is_started(kind: FailureKind) -> None:
    assert rounds_of([(kind, 10)], restarts=9) == 1


def test_another_exception_or_another_step_is_tried_once_more() -> None:
    traceback = FailureKind.EXCEPTION
    assert rounds_of([(traceback, 10), (traceback, 20), (traceback, 20)], restarts=9) == 3


def test_a_rank_that_is_killed_for_memory_may_have_a_greedy_neighbor() -> None:
    supervisor = Supervisor(Recovery(restarts=1), lambda: 7, lambda: lambda: 0)
    killed = [End(FailureKind.HOST_MEMORY, "was killed by SIGKILL", 0.0)]
    assert supervisor.next_entry(killed, LaunchResult(FailureKind.HOST_MEMORY, "")) is not None
    assert supervisor.next_entry(killed, LaunchResult(FailureKind.HOST_MEMORY, "")) is None


def rounds_of(failures: Sequence[tuple[FailureKind, int]], restarts: int | Recovery) -> int:
    """The number of rounds if these fail in turn, and one after them is done."""
    recovery = restarts if isinstance(restarts, Recovery) else Recovery(restarts=restarts)
    steps = iter([step for _, step in failures])
    supervisor = Supervisor(recovery, lambda: next(steps), lambda: lambda: 0)
    for kind, _ in failures:
        ends = [End(FailureKind.ENDED, "", 1.0), End(kind, "KeyError: 17", 0.0)]
        if supervisor.next_entry(ends, LaunchResult(kind, "rank 1 failed")) is None:
            return supervisor.rounds
    return supervisor.rounds + 1


def test_budgets_are_those_of_the_kinds() -> None:
    assert {retry.value for retry in Retry} - {"never"} == {*Budgets.model_fields}
    assert {kind.retry for kind in FailureKind} == {*Retry}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(5, "EIO"), FailureKind.DEVICE),
        (TimeoutError("no answer"), FailureKind.DEVICE),
        (RuntimeError("CUDA error: 7"), FailureKind.DEVICE),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), FailureKind.DEVICE),
        (FileNotFoundError("a"), FailureKind.EXCEPTION),
        (KeyError("OSError"), FailureKind.EXCEPTION),
        (OutOfMemory("in the forward", too_large={"batch.micro_size": 8}), FailureKind.OUT_OF_MEMORY),
        (WorkerDied("a data worker died", kind=FailureKind.WORKER_EXITED), FailureKind.WORKER_EXITED),
        (UnusableSamples("sample 3 can't be read"), FailureKind.SAMPLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.name,
)
def test_an_end_has_the_kind_of_its_error(error: BaseException, kind: FailureKind) -> None:
    assert end_of_exception(error, 0.0, None).kind is kind


def test_a_failure_keeps_its_kind_between_processes() -> None:
    for failure in (ConfigError("x", FailureKind.OTHER_DATA), WorkerDied("x", (1,), kind=FailureKind.WORKER_EXITED)):
        assert pickle.loads(pickle.dumps(failure)).kind is failure.kind


@pytest.mark.parametrize(("by_kernel", "kind"), [(True, FailureKind.HOST_MEMORY), (False, FailureKind.KILLED)])
def test_the_cause_of_a_sigkill_decides_its_kind(by_kernel: bool, kind: FailureKind) -> None:
    why = lambda: WhyKilled("why", by_kernel)  # noqa: E731
    assert with_cause(end_of_process(-9, 0.0), why).kind is kind
    assert with_cause(end_of_process(-11, 0.0), why).kind is FailureKind.CRASHED


def test_each_kind_has_its_budget() -> None:
    recovery = Recovery(restarts=1, budgets=Budgets(transient=3, program=0))
    killed, raised, hung = (FailureKind.KILLED, 10), (FailureKind.EXCEPTION, 10), (FailureKind.TIMED_OUT, 10)
    assert rounds_of([killed] * 5, recovery) == 4
    assert rounds_of([raised], recovery) == 1
    assert rounds_of([hung, killed, hung], recovery) == 3
    assert not Recovery(restarts=0).ever
    assert Recovery(restarts=0, budgets=Budgets(host=1)).ever


def test_an_exception_in_the_first_update_ends_the_run() -> None:
    assert rounds_of([(FailureKind.EXCEPTION, 0)], Recovery()) == 1
