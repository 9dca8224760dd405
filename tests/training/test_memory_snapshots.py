"""Snapshots in the launcher's memory: ranks that are killed resume from them, and the last failure loses none."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from kit import small
from kit.commands import Done, run_lockstep, start_lockstep
from kit.failures import gives
from safetensors.torch import load_file

from lockstep.checkpoint.inspection import verify_all
from lockstep.checkpoint.local import LocalStorage
from lockstep.launch.memory_folder import MemoryFolder
from lockstep.resilience.faults import FAULTS, Fault, events_of, write_plan

STEPS = 12
LAST_LINES = {*range(1, 10)}  # of the last 50 ms before a kill in step 10, which a first rank may not have written


def write_config(folder: Path, strategy: str = "fsdp", **recovery: Any) -> Path:
    config = small.config(
        run={"steps": STEPS, "folder": str(folder)},
        parallel={"strategy": strategy},
        launch={"ranks": 2},
        recovery={"snapshot_every": 2, **recovery},
        checkpoint={"every": None},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0},
    )
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def train(folder: Path, fault: Fault | None = None, *words: str, strategy: str = "fsdp", **recovery: Any) -> Done:
    file = write_config(folder, strategy, **recovery)
    plan = folder.parent / "faults.json"
    if fault is not None:
        write_plan(plan, [fault])
    return run_lockstep("train", file, *words, **{FAULTS: str(plan) if plan.exists() else None})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(folder, snapshot_every=None).returncode == 0
    return folder


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def assert_same(run: Path, other: Path, *, since: int = 0, may_lack: set[int] | None = None) -> None:
    found, expected_lines = ({line for line in losses(each) if line[0] > since} for each in (run, other))
    assert found <= expected_lines
    assert {step for step, _ in expected_lines - found} <= (may_lack or set())
    weights, expected = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def memory_of(run: Path) -> MemoryFolder:
    memory = MemoryFolder.make(run)
    assert memory is not None
    return memory


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_the_updates_since_the_last_snapshot(tmp_path: Path, undisturbed: Path, rank: int) -> None:
    run = tmp_path / "run"
    done = train(run, Fault("kill", rank, 10, "data"))
    assert done.returncode == 0, done.stderr
    assert any(f"resumes from step {step} " in done.stdout for step in (6, 8)), done.stdout
    assert "which was in memory" in done.stdout
    assert_same(run, undisturbed, may_lack=LAST_LINES if rank == 0 else None)
    with_lock = memory_of(run)
    assert [entry.name for entry in with_lock.path.iterdir()] == ["lock"]
    with_lock.remove()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_under_ddp_costs_no_update_if_another_holds_the_state(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    done = train(run, Fault("kill", rank, 10, "data"), strategy="ddp", snapshot_every=STEPS)
    assert done.returncode == 0, done.stderr
    assert "resumes from step 9 (" in done.stdout
    missing = set(range(1, STEPS + 1)) - {step for step, _ in losses(run)}
    assert missing <= (LAST_LINES if rank == 0 else set())
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1] == f"step-{STEPS:08d}"


def test_the_state_of_the_rank_that_is_left_is_saved_at_the_last_failure(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = train(run, Fault("kill", 0, 10, "data"), strategy="ddp", snapshot_every=STEPS, restarts=0)
    assert done.returncode == 1
    assert LocalStorage(run / "checkpoints").names() == ["step-00000009"]
    assert [result.fault for result in verify_all(LocalStorage(run / "checkpoints"))] == [None]


def test_the_last_failure_saves_the_newest_snapshot(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    done = train(run, Fault("kill", 1, 10, "data"), restarts=0)
    assert done.returncode == 1
    assert gives(done.stderr, "in memory", run / "checkpoints")
    assert [result.fault for result in verify_all(LocalStorage(run / "checkpoints"))] == [None]
    assert train(run).returncode == 0
    assert_same(run, undisturbed)


class Deleting(small.Net):
    """Deletes the run's folder in update 10, and kills all ranks before the first one looks for it."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = Path(run)
        self.updates = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.updates += self.training
        if self.updates == 10 and os.environ["RANK"] == "1":
            shutil.rmtree(self._run)
            for process in psutil.Process(os.getppid()).children():
                if process.pid != os.getpid():
                    process.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(points)


@pytest.mark.parametrize("restarts", [0, 1])
def test_memory_outlives_the_run_folder(tmp_path: Path, undisturbed: Path, restarts: int) -> None:
    run = tmp_path / "run"
    file = write_config(run, restarts=restarts)
    model = {"kind": "custom", "target": f"{__file__}:Deleting", "arguments": {"run": str(run)}}
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "model": model}))
    done = run_lockstep("train", file)
    assert re.search(r"step [68] was in memory", done.stderr), done.stderr
    done = run_lockstep("train", run, "--trust-run")
    assert done.returncode == 0, done.stderr
    resumed = re.search(r"resumes from step ([68]) ", done.stdout)
    assert resumed is not None
    assert_same(run, undisturbed, since=int(resumed[1]))


def test_a_killed_launcher_leaves_its_memory_to_the_next_start(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    assert train(run, Fault("host", 1, 10, "data")).returncode != 0
    again = train(run)
    assert again.returncode == 0, again.stderr
    assert "which was in memory" in again.stdout
    assert_same(run, undisturbed)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "was in memory, and is saved in"),
        (
            ("--recovery.snapshot_every=null", "--checkpoint.every=4", "--checkpoint.asynchronous=false"),
            "\nthe state after step 8 is saved in",
        ),
    ],
)
def test_a_stop_in_an_update_that_outlasts_the_grace_names_what_is_saved(
    tmp_path: Path, undisturbed: Path, flags: tuple[str, ...], said: str
) -> None:
    run, plan = tmp_path / "run", tmp_path / "faults.json"
    write_plan(plan, [Fault("hang", 1, 10, "data")])
    variables = json.dumps({FAULTS: str(plan)})
    running = start_lockstep(
        "train", write_config(run), "--launch.grace", 1, "--launch.environment", variables, *flags, cwd=tmp_path
    )
    running.wait_for(lambda: any(event["event"] == "fired" for event in events_of(plan)))
    running.send(signal.SIGTERM)
    assert running.end() == 75, running.output
    assert said in running.output
    assert train(run).returncode == 0
    assert_same(run, undisturbed)
