"""The run folder: made once, never mixed with anything else, and marked when the run is finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from kit.reports import FACTS, report

from lockstep.core.errors import RunFailed
from lockstep.core.progress import Progress
from lockstep.core.records import EvaluationReport
from lockstep.monitor import environment, folder
from lockstep.monitor.events import summarize
from lockstep.monitor.folder import (
    CONFIG,
    ENVIRONMENT,
    LOGS,
    METRICS,
    SUMMARY,
    TENSORBOARD,
    RunFolder,
    is_finished,
    is_run,
    read_summary,
)


def test_the_default_is_named_after_recipe_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(None, "recipes/stdlib-lm.yaml")
    assert run.path.parent == tmp_path / "runs"
    assert run.path.name.startswith("stdlib-lm-20")
    assert run.path.is_absolute()
    assert (run.path / LOGS).is_dir()
    assert (run.path / TENSORBOARD).is_dir()


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "20261121-093000")
    runs: list[RunFolder] = []
    threads = [threading.Thread(target=lambda: runs.append(RunFolder.create(None, "digits"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {run.path.name for run in runs}
    assert names == {"digits-20261121-093000", *(f"digits-20261121-093000-{number}" for number in range(2, 9))}


def test_it_holds_the_config_and_the_environment(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write(CONFIG, "run:\n  steps: 10\noptim:\n  lr: 0.0003\n")
    run.write(ENVIRONMENT, environment.describe())
    assert yaml.safe_load((run.path / CONFIG).read_text()) == {"run": {"steps": 10}, "optim": {"lr": 3e-4}}
    recorded = json.loads((run.path / "environment.json").read_text())
    assert {"python", "packages", "platform", "cpu", "gpus", "git", "command_line", "variables"} <= set(recorded)
    assert recorded["packages"]["torch"]
    assert recorded["packages"]["lockstep-torch"]
    assert [name for name in os.listdir(run.path) if name.endswith(".new")] == []


def test_ranks_open_the_folder_that_was_created(tmp_path: Path) -> None:
    made = RunFolder.create(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").path == made.path
    with pytest.raises(RunFailed, match="is not the folder of a run"):
        RunFolder.open(tmp_path)


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunFailed, match=r"has other content \(thesis.tex\); give run.folder the name of a new folder"):
        RunFolder.create(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_finished_run_is_marked_and_not_trained_again(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    assert not is_finished(run.path)
    assert read_summary(run.path) is None
    summary = summarize(FACTS, Progress(30, 1920, 491520), report(30), [], 3.0)
    run.write(SUMMARY, summary)
    run.release()
    assert is_finished(tmp_path / "run")
    assert read_summary(tmp_path / "run") == summary
    with pytest.raises(RunFailed, match=r"is finished; give run.folder another name"):
        RunFolder.create(tmp_path / "run")
    RunFolder.create(tmp_path / "run", again=True)


def test_files_of_an_earlier_attempt_are_archived_when_the_run_starts_from_scratch(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        run = RunFolder.create(tmp_path / "run")
        run.archive_attempt()
        run.write(CONFIG, f"attempt: {attempt}\n")
        (run.path / METRICS).write_text(f"{attempt}\n")
        run.release()
    assert [(run.path / "earlier" / name / "metrics.jsonl").read_text() for name in ("1", "2")] == ["1\n", "2\n"]
    assert (run.path / METRICS).read_text() == "3\n"
    assert is_run(run.path)


def test_a_running_run_keeps_its_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from lockstep.monitor.folder import RunFolder\n"
        "run = RunFolder.create(sys.argv[1]); print('made', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with pytest.raises(RunFailed, match=rf"is running \(process {other.pid} on "):
            RunFolder.create(tmp_path / "run")
        other.stdin.close()
    RunFolder.create(tmp_path / "run")


def test_a_folder_that_can_not_be_written_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match=r"can't create the run folder .*/file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run")
    run = RunFolder.create(tmp_path / "run")
    (run.path / "config.yaml").mkdir()
    with pytest.raises(RunFailed, match=r"can't write .*/run/config.yaml: Is a directory"):
        run.write(CONFIG, "")
    assert not any(name.endswith(".new") for name in os.listdir(run.path))


def test_a_full_disk_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path / "run")
    monkeypatch.setattr(folder.os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(RunFailed, match=r"can't write .*/run/config.yaml: No space left on device"):
        run.write(CONFIG, "")
    assert sorted(os.listdir(run.path)) == ["logs", "run.lock", "tensorboard"]


def test_the_summary_of_one_evaluation_set_of_several_and_of_none() -> None:
    def evaluation(name: str, step: int, **metrics: float) -> EvaluationReport:
        return EvaluationReport(name, step, metrics, 10, 0.1)

    done = Progress(30, 1920, 491520)
    summary = summarize(
        FACTS, done, report(30), [evaluation("a", 10, loss=2.0), evaluation("a", 30, loss=1.0, accuracy=0.9)], 3.25
    )
    assert summary["evaluation"] == {"a": {"loss": 1.0, "accuracy": 0.9}}
    expected = {"run": FACTS.folder, "steps": 30, "samples": 1920, "tokens": 491520, "seconds": 3.25, "discarded": 0}
    assert {name: summary[name] for name in expected} == expected
    assert (summary["loss"], summary["ranks"], summary["strategy"]) == (1 + 1 / 30, 2, "ddp")
    several = summarize(
        FACTS, done, report(30, loss=float("nan")), [evaluation("a", 30, loss=1.0), evaluation("b", 30, loss=2.0)], 1
    )
    assert several["evaluation"] == {"a": {"loss": 1.0}, "b": {"loss": 2.0}}
    assert several["loss"] is None
    nothing = summarize(FACTS, Progress(), None, [], 0.0)
    assert (nothing["steps"], nothing["evaluation"], nothing["loss"]) == (0, {}, None)
    assert json.loads(json.dumps(nothing, allow_nan=False)) == nothing


def test_secrets_are_not_written_down() -> None:
    variables = environment.relevant_variables(
        {
            "NCCL_DEBUG": "INFO",
            "WORLD_SIZE": "2",
            "HF_TOKEN": "hf_abc",
            "HF_ENDPOINT": "https://me:hunter2@hub.example",
            "AWS_SECRET_ACCESS_KEY": "abc",
            "HOME": "/home/me",
        }
    )
    assert variables == {
        "NCCL_DEBUG": "INFO",
        "WORLD_SIZE": "2",
        "HF_TOKEN": "(hidden)",
        "HF_ENDPOINT": "https://(hidden)@hub.example",
    }
    line = ["lockstep", "train", "x", "--run.tokens", "1M", "--hub.token", "abc", "--api-key=abc", "a.tokenizer=b"]
    assert environment.hide_arguments(line) == [
        *(
            "lockstep",
            "train",
            "x",
            "--run.tokens",
            "1M",
            "--hub.token",
            "(hidden)",
            "--api-key=(hidden)",
            "a.tokenizer=b",
        )
    ]


def test_the_state_of_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment.describe()["git"] is None
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    (tmp_path / "model.py").write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    state = environment.describe()["git"]
    assert (len(state["commit"]), state["branch"], state["changed_files"]) == (40, "main", 0)
    (tmp_path / "model.py").write_text("2\n")
    assert environment.describe()["git"]["changed_files"] == 1


def test_no_program_that_a_repository_names_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "config", "core.fsmonitor", "touch executed; cat"], check=True)
    assert environment.describe()["git"]["changed_files"] == 0
    assert not (tmp_path / "executed").exists()
