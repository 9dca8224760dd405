"""Ranks that fail are started again by their launcher, and the run ends where the undisturbed one does."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.commands import Done, run_lockstep, start_lockstep
from safetensors.torch import load_file

from lockstep.config.training_sections import Budgets, Recovery
from lockstep.doctor.run import diagnose_run
from lockstep.launch.ends import End, EndKind
from lockstep.launch.ends_file import read_ends
from lockstep.launch.failure_kinds import kind_of
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
    assert [ends.code == 0 for ends in read_ends(folder / "logs")] == [False, True]
    assert losses(folder) == losses(undisturbed)
    first, second = read_attempts(folder)
    assert first.launched < first.began <= second.launched < second.began
    weights, expected = (load_file(run / "model" / "model.safetensors") for run in (folder, undisturbed))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items() if name != "updates")


@pytest.mark.parametrize(
    ("how", "rounds", "text"),
    [("kill", 3, "had been started again 2 times"), ("raise", 2, "had been started again once")],
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
    assert "rank 1 is stopped (SIGSTOP) in its forward (update 7)" in done.stderr
    assert "it gets SIGCONT" in done.stderr
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    done = train(tmp_path / "run", 0, {"how": "hang", "at": 7})
    assert done.returncode == 124
    assert re.search(r"rank 1 hangs in its forward at .*failing_models\.py:\d+ in forward \(update 7\)", done.stderr)
    (ends,) = read_ends(tmp_path / "run" / "logs")
    assert (ends.cause, ends.ranks[1].end, ends.code) == (1, "hung", 124)
    assert "--- rank 0" in (tmp_path / "run" / "logs" / "hangs.txt").read_text()


@pytest.mark.drill
def test_the_last_evaluation_has_the_limits_of_the_others(tmp_path: Path, undisturbed: Path) -> None:
    """A rank that hangs in it is killed after four times `other`, long before what may take long at the end."""
    arguments = {"how": "hang in an evaluation", "at": 12, "once": str(tmp_path / "once")}
    limits = "--recovery.watchdog={least: 0.5, end_after: 1.0, other: 1.0}"
    done = train(tmp_path / "run", 1, arguments, limits)
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 1 hangs in an evaluation at .*failing_models\.py:\d+ in forward", done.stderr)
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_run_in_which_a_rank_hangs_stops_soon_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = written(folder, 0, {"how": "hang", "at": 7})
    limits = "--recovery.watchdog={least: 0.5, end_after: null}"
    words = [limits, "--launch.timeout=600", "--recovery.snapshot_every=1"]
    running = start_lockstep("train", file, *words, cwd=tmp_path)
    running.wait_for(lambda: "rank 1 hasn't moved" in running.output)
    began = time.monotonic()
    running.send(signal.SIGTERM)
    assert running.end() == 75
    assert time.monotonic() - began < 60.0  # and not launch.timeout
    assert "the state after step 6 was in memory, and is saved" in running.output
    assert diagnose_run(folder).resume


def test_a_run_that_gets_further_each_time_goes_on() -> None:
    assert rounds_of([(EndKind.KILLED, step) for step in (10, 20, 30, 40)], restarts=1) == 5
    assert rounds_of([(EndKind.KILLED, step) for step in (10, 20, 20, 20)], restarts=1) == 3
    assert rounds_of([(EndKind.KILLED, step) for step in (10, 20, 20, 30, 30)], restarts=2) == 6


@pytest.mark.parametrize("kind", [EndKind.MESSAGE, EndKind.PAUSED, EndKind.INTERRUPTED])
def test_ends_after_which_no_rank_is_started(kind: EndKind) -> None:
    assert rounds_of([(kind, 10)], restarts=9) == 1


def test_another_exception_or_another_step_is_tried_once_more() -> None:
    traceback = EndKind.TRACEBACK
    assert rounds_of([(traceback, 10), (traceback, 20), (traceback, 20)], restarts=9) == 3


def test_a_rank_that_is_killed_for_memory_may_have_a_greedy_neighbor() -> None:
    supervisor = Supervisor(Recovery(restarts=1), lambda: 7, lambda: lambda: 0)
    killed = [End(EndKind.KILLED, 1, "was killed by SIGKILL: out of memory (the kernel's OOM killer was", 0.0)]
    assert supervisor.next_entry(killed, LaunchResult(1, "")) is not None
    assert supervisor.next_entry(killed, LaunchResult(1, "")) is None


def rounds_of(failures: Sequence[tuple[EndKind, int]], restarts: int | Recovery) -> int:
    """The number of rounds if these fail in turn, and one after them is done."""
    recovery = restarts if isinstance(restarts, Recovery) else Recovery(restarts=restarts)
    steps = iter([step for _, step in failures])
    supervisor = Supervisor(recovery, lambda: next(steps), lambda: lambda: 0)
    for kind, _ in failures:
        ends = [End(EndKind.ENDED, 1, "", 1.0), End(kind, 1, "KeyError: 17", 0.0)]
        if supervisor.next_entry(ends, LaunchResult(1, "rank 1 failed")) is None:
            return supervisor.rounds
    return supervisor.rounds + 1


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (End(EndKind.KILLED, 1, "was killed by SIGKILL", 0.0), "transient"),
        (End(EndKind.TRACEBACK, 1, "Traceback (most\n  x\nOSError: [Errno 5] EIO", 0.0), "transient"),
        (End(EndKind.TRACEBACK, 1, "Traceback (most\n  x\nRuntimeError: CUDA error: 7", 0.0), "transient"),
        (End(EndKind.TRACEBACK, 1, "Traceback (most\n  x\nFileNotFoundError: a", 0.0), "program"),
        (End(EndKind.TRACEBACK, 1, "Traceback (most\n  x\nKeyError: 'OSError'", 0.0), "program"),
        (End(EndKind.EXITED, 3, "called sys.exit(3)", 0.0), "program"),
        (End(EndKind.TIMED_OUT, 1, "", 0.0), "hang"),
        (End(EndKind.LOST, 1, "", 0.0), "host"),
        (End(EndKind.MESSAGE, 2, "wrong key", 0.0), "config"),
        (End(EndKind.MESSAGE, 1, "out of memory", 0.0, advice="set batch.micro_size"), "memory"),
        (End(EndKind.MESSAGE, 1, "any", 0.0, worker_was_killed=True), "transient"),
        (End(EndKind.MESSAGE, 1, "out of memory (the kernel's OOM killer, in", 0.0, worker_was_killed=True), "memory"),
        (End(EndKind.MESSAGE, 1, "any", 0.0, worker_has_exited=True, samples=()), "program"),
        (End(EndKind.MESSAGE, 1, "out of memory", 0.0, too_large={"evaluation.micro_size": 8}), "memory"),
        (End(EndKind.KILLED, 1, "was killed by SIGKILL: out of memory (the kernel's OOM killer, in", 0.0), "memory"),
        (End(EndKind.PAUSED, 75, "", 0.0), "request"),
    ],
)  # fmt: skip
def test_kinds_of_failures(end: End, kind: str) -> None:
    assert kind_of(end).value == kind


def test_each_kind_has_its_budget() -> None:
    recovery = Recovery(restarts=1, budgets=Budgets(transient=3, program=0))
    killed, raised, hung = (EndKind.KILLED, 10), (EndKind.TRACEBACK, 10), (EndKind.TIMED_OUT, 10)
    assert rounds_of([killed] * 5, recovery) == 4
    assert rounds_of([raised], recovery) == 1
    assert rounds_of([hung, killed, hung], recovery) == 3
    assert not Recovery(restarts=0).ever
    assert Recovery(restarts=0, budgets=Budgets(host=1)).ever


def test_an_exception_in_the_first_update_ends_the_run() -> None:
    assert rounds_of([(EndKind.TRACEBACK, 0)], Recovery()) == 1
