"""A sample whose reading ends the process is named, and the run resumes without it if the config leaves it out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit import small
from kit.commands import Done, run_lockstep
from kit.failures import gives

from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.local import LocalStorage
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import Reading
from lockstep.launch.ends import End, end_of_process, while_reading
from lockstep.launch.supervision import advice_on_samples

DATA = f"{Path(__file__).parent / 'ending_data.py'}"


def written(folder: Path, ranks: int = 1, kind: str = "Points", **sections: Any) -> Path:
    faults = {str(index): fault for index, fault in sections.pop("faults", {}).items()}
    train = {"kind": "custom", "target": f"{DATA}:{kind}", "arguments": {"faults": faults}}
    config = small.config(
        data={"train": train, "loader": {"workers": sections.pop("workers", 0)}, **sections.pop("data", {})},
        batch={"global_size": 8, "micro_size": 4},
        run={"steps": 12, "seed": 0, "folder": str(folder)},
        parallel={"strategy": "ddp" if ranks > 1 else "single"},
        launch={"ranks": ranks},
        recovery={"restarts": 1, "watchdog": {"least": 0.4, "steps": 1, "end_after": 0.8}},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0},
    )
    file = folder.parent / f"{folder.name}.yaml"
    model = {"kind": "custom", "target": f"{Path(small.__file__)}:Net"}
    file.write_text(yaml.safe_dump({**config, "model": model, "objective": {"kind": "classification"}}))
    return file


def train(folder: Path, *words: str, **sections: Any) -> Done:
    return run_lockstep("train", written(folder, **sections), *words)


def assert_same(folder: Path, other: Path) -> None:
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, other)
    ]
    assert losses[0] == losses[1]
    stores = [LocalStorage(run / "checkpoints") for run in (folder, other)]
    compared = compare(*(OpenCheckpoint(storage, storage.names()[-1]) for storage in stores))
    assert compared.same > 0
    assert not compared.values


@pytest.mark.parametrize(
    ("kind", "fault", "workers", "sample"),
    [
        ("Points", "crash", 0, "sample 11"),
        pytest.param("Points", "exit as if done", 1, "sample 11", marks=pytest.mark.drill),
        pytest.param("Points", "kill", 1, "sample 11", marks=pytest.mark.drill),
        pytest.param("Points", "hang with the interpreter's lock", 0, "sample 11", marks=pytest.mark.drill),
        pytest.param("Points", "hang", 1, "sample 11", marks=pytest.mark.drill),
        pytest.param("Lists", "abort", 0, "one of samples 8, 9, 10, 11", marks=pytest.mark.drill),
    ],
)
def test_the_run_ends_with_its_name_and_resumes_without_it(
    tmp_path: Path, kind: str, fault: str, workers: int, sample: str
) -> None:
    sections = {"kind": kind, "faults": {11: fault}, "workers": workers, "data": {"shuffle": False}}
    done = train(tmp_path / "run", "--recovery.watchdog.other=1.0", **sections)  # it is fetched in the first update
    assert done.returncode == 1 or fault.startswith("hang")
    again = done.stderr.count("its ranks start again")
    assert again == 1 or (again == 0 and fault.startswith("exit"))  # not after an exit before the first update
    assert gives(done.stderr, sample, "data.leave_out")
    assert "look at the host" not in done.stderr
    leave_out = "--data.leave_out=[[11, 11]]"
    for folder in ("run", "told"):
        assert train(tmp_path / folder, leave_out, **sections).returncode == 0
    assert_same(tmp_path / "run", tmp_path / "told")


@pytest.mark.drill
def test_under_torchrun(tmp_path: Path) -> None:
    written(tmp_path / "run", ranks=2, faults={11: "crash"})
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    done = subprocess.run(
        [sys.executable, *words, "-m", "lockstep", "train", "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode != 0
    assert gives(done.stderr, "sample 11", "data.leave_out='[[11, 11]]'")


@pytest.mark.drill
@pytest.mark.parametrize(
    ("kind", "fault", "workers", "sample"),
    [
        ("Points", "exit", 1, "sample 11"),
        ("Points", "hang", 0, "sample 11"),
        ("Lists", "exit as if done", 0, "one of samples 8, 9, 10, 11"),
    ],
)
def test_of_an_evaluation_set_it_is_named_with_the_set(
    tmp_path: Path, kind: str, fault: str, workers: int, sample: str
) -> None:
    held_out = {"kind": "custom", "target": f"{DATA}:{kind}", "arguments": {"faults": {"11": fault}}}
    sections = {"evaluation": {"fine": {"kind": "custom", "target": f"{DATA}:Points"}, "held-out": held_out}}
    done = train(tmp_path / "run", "--recovery.watchdog.other=1.0", data=sections, workers=workers)
    assert done.returncode != 0
    assert gives(done.stderr, f"{sample} of data.evaluation.held-out")
    found = run_lockstep("doctor", tmp_path / "run").stdout
    assert f"{sample} of data.evaluation.held-out" in found
    assert "data.leave_out='[[" not in found.replace("[[N, N]]", "")


def test_a_run_starts_over_where_its_records_cant_be_deleted(tmp_path: Path) -> None:
    """One is a folder here, which a file system that is read-only would not delete, either."""
    assert train(tmp_path / "run").returncode == 0
    (tmp_path / "run" / "logs" / "rollbacks.json").mkdir()
    done = train(tmp_path / "run", "--fresh")
    assert done.returncode == 0, done.stderr


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exitcode", "kind"),
    [
        (-11, FailureKind.CRASHED),
        (-6, FailureKind.CRASHED),
        (3, FailureKind.EXITED),
        (0, FailureKind.EXITED),
        (75, FailureKind.EXITED),
        (130, FailureKind.EXITED),
    ],
)
def test_ends_while_a_sample_is_read(exitcode: int, kind: FailureKind) -> None:
    end = while_reading(end_of_process(exitcode, 0.0), Reading((7,)))
    assert (end.kind, end.samples) == (kind, (7,))
    assert "sample 7" in end.text
    assert "data.leave_out='[[7, 7]]'" in advice_on_samples(end)


def test_samples_of_an_evaluation_set_are_no_training_samples() -> None:
    end = End(FailureKind.KILLED, "was killed by SIGSEGV", 0.0, samples=(7,), evaluation_set="held-out")
    assert gives(advice_on_samples(end), 7, "data.evaluation.held-out")
    assert "leave_out='" not in advice_on_samples(end)


def test_a_stop_is_no_death() -> None:
    stopped = end_of_process(-15, 0.0)
    assert while_reading(stopped, Reading((7,))) == stopped
