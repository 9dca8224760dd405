"""`lockstep doctor RUN` states what happened in a run, with file and line, whatever its files are like."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from kit.commands import run_lockstep

from lockstep.core.errors import ConfigError
from lockstep.doctor.known_failures import KNOWN, Standing
from lockstep.doctor.run import describe_run, diagnose_run, run_as_json
from lockstep.monitor.folder import RunFolder

GLOO_CLOSED = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:4410"


def _run(folder: Path, *logs: str, metrics: str = "", events: str = "") -> Path:
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {steps: 10}\n")
    (run / "environment.json").write_text("{}")
    for rank, text in enumerate(logs):
        (run / "logs" / f"rank-{rank}.log").write_text(text)
    (run / "metrics.jsonl").write_text(metrics)
    (run / "events.jsonl").write_text(events)
    return run


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    out_of_memory = "step 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"
    run = _run(tmp_path, f"step 3\nstep 4\n{GLOO_CLOSED}\n", out_of_memory, metrics='{"step": 3, "loss": 1.0}\n')
    diagnosis = diagnose_run(run)
    assert diagnosis.is_wrong
    assert diagnosis.state == "failed after step 3 of 10"
    assert [item.failure.name for item in diagnosis.seen] == ["GPU out of memory", "peer closed its connection"]
    (line,) = diagnosis.seen[0].evidence
    assert (line.file, line.line, line.rank) == ("logs/rank-1.log", 2, 1)
    text = describe_run(diagnosis, 80)
    assert text.index("cause: GPU out of memory") < text.index("consequence: peer closed its connection")
    assert "logs/rank-1.log:2: torch.OutOfMemoryError" in text
    assert max(len(row) for row in text.splitlines() if not row.startswith(str(tmp_path))) <= 80
    content = run_as_json(diagnosis)
    assert content["failures"][0]["evidence"][0]["line"] == 2


def test_a_rank_that_ended_silently_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path, f"{GLOO_CLOSED}\n", "step 3\n", f"{GLOO_CLOSED}\n")
    diagnosis = diagnose_run(run)
    assert diagnosis.is_wrong
    assert "rank 1 ended without a message: killed, or hung. Run dmesg on that host." in diagnosis.notes


def test_a_finished_run_is_fine_whatever_it_survived(tmp_path: Path) -> None:
    run = _run(tmp_path, f"{GLOO_CLOSED}\n", metrics='{"step": 10, "loss": 1.0}\n')
    (run / "summary.json").write_text("{}")
    diagnosis = diagnose_run(run)
    assert not diagnosis.is_wrong
    assert diagnosis.state == "finished (step 10 of 10)"


def test_a_running_run_is_not_wrong(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    (run.path / "config.yaml").write_text("run: {steps: 10}\n")
    assert diagnose_run(run.path).state.startswith("running")
    run.release()
    assert diagnose_run(run.path).state.startswith("ended after no update")


def test_discarded_updates_and_failed_saves_are_remarks(tmp_path: Path) -> None:
    metrics = '{"step": 1, "kept": true, "verdict": "kept"}\n{"step": 2, "kept": false, "verdict": "non_finite"}\n'
    events = '{"saved": 2, "step": 2, "bytes": 0, "seconds": 1, "lost_seconds": 0, "failure": "no space"}\n'
    diagnosis = diagnose_run(_run(tmp_path, "fine\n", metrics=metrics, events=events))
    assert not diagnosis.is_wrong
    assert [(item.failure.name, item.failure.standing) for item in diagnosis.seen] == [
        ("updates discarded", Standing.REMARK),
        ("save failed", Standing.REMARK),
    ]
    assert diagnosis.seen[0].evidence[0].line == 2


def test_damaged_and_hostile_files_are_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.doctor import run as module

    monkeypatch.setattr(module, "_MOST_READ", 1000)
    bad = "\x1b]0;evil\x07 CUDA out of memory \x1b[2J"
    run = _run(tmp_path, "x\n" * 5000 + bad, metrics="{{{\n\x00\n", events="[1]\n")
    (run / "logs" / "rank-1.log").write_bytes(os.urandom(5000))
    os.mkfifo(tmp_path / "pipe")
    diagnosis = diagnose_run(run)
    (item,) = (item for item in diagnosis.seen if item.failure.name == "GPU out of memory")
    assert item.evidence[0].line == 5001  # lines before the part that is read count, too
    assert "\x1b" not in describe_run(diagnosis, 80)
    (run / "logs" / "rank-2.log").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="outside of the run's folder"):
        diagnose_run(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        diagnose_run(tmp_path)


PROGRAM = """
import os, signal, torch

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {"x": torch.randn(4), "labels": index % 2}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 2), 0
    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > 2:
            FAULT
        return self.layer(x)
"""


@pytest.mark.parametrize(
    ("fault", "cause", "text"),
    [
        ("raise ValueError('the sensor has 3 columns')", "cause: an exception", "the sensor has 3 columns"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "consequence: peer closed", "rank 1 ended without a message"),
    ],
)
def test_a_run_that_really_failed_is_explained(fault: str, cause: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM.replace("FAULT", fault))
    config = {
        "model": {"kind": "custom", "target": "mine.py:Net"},
        "objective": {"kind": "classification"},
        "data": {"train": {"kind": "custom", "target": "mine.py:Points"}},
        "batch": {"global_size": 8},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False},
        "run": {"steps": 5, "folder": "run"},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    done = run_lockstep("train", "run.json", "--ranks", 2, cwd=tmp_path)
    assert done.returncode == 1
    explained = run_lockstep("doctor", "run", cwd=tmp_path)
    assert explained.returncode == 3, done.stderr
    assert cause in explained.stdout
    assert text in explained.stdout


def test_the_command_refuses_two_questions_at_once(tmp_path: Path) -> None:
    done = run_lockstep("doctor", "--known", "--ranks", 2, cwd=tmp_path)
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
    assert run_lockstep("doctor", "--known", cwd=tmp_path).stdout.startswith(f"{len(KNOWN)} known failures")
