"""Links and folders in an untrusted run's folder lead to no files outside of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.config import trust
from lockstep.config.loading import validate

CONFIG = {  # which names no code
    "model": {"kind": "image-classifier", "layers": 1, "width": 8},
    "data": {"train": {"kind": "digits"}, "evaluation": {"held-out": {"kind": "digits", "split": "held-out"}}},
    "launch": {"device": "cpu", "ranks": 1},
    "monitor": {"tensorboard": False, "progress": "none"},
    "run": {"steps": 2},
}
VERBS = {
    "train": ("train", "*", "run.steps=4"),
    "train --fresh": ("train", "*", "--fresh"),
    "train --fork": ("train", "*", "--fork", "new"),
    "report": ("report", "*"),
    "prune": ("ckpt", "prune", "*", "--aside"),
    "verify": ("ckpt", "verify", "*"),
    "export": ("export", "*"),
    "eval": ("eval", "*"),
}
LINKS = (
    "run.lock", "metrics.jsonl", "events.jsonl", "environment.json", "summary.json", "report.html", "model", "logs",
    "earlier", "tensorboard", "checkpoints", "export", "logs/rank-0.log", "tensorboard/events.out.tfevents.1.lockstep",
    "earlier/1", "model/model.safetensors",
)  # fmt: skip


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Files of the user's own, and checkpoints of another run."""
    folder = tmp_path / "victim"
    for step in (1, 2, 3):
        checkpoint = folder / f"step-0000000{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        (checkpoint / "rank-00000.safetensors").write_text("weights")
    (folder / "broken-step-00000001").mkdir()
    (folder / "file").write_text("precious")
    return folder


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "stranger"
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(CONFIG))
    (run / "environment.json").write_text(json.dumps({"run": "a" * 32}))
    return run


def _contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def _do(verb: str, run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([word.replace("*", str(run)) for word in VERBS[verb]])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("name", LINKS)
def test_links_out_of_a_run_are_refused(
    victim: Path, stranger: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    link, target = stranger / name, victim / "file"
    if name in ("model", "logs", "earlier", "tensorboard", "checkpoints", "export", "earlier/1"):
        target = victim
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
    before = _contents(victim)
    for verb in VERBS:
        code, output = _do(verb, stranger, capsys)
        assert (code, output.count("\n")) == (2, 1), (verb, output)
        assert f"{link} is a link to {target}, outside of the run's folder" in output, verb
    assert _contents(victim) == before


def test_pipes_block_no_command(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(stranger / "metrics.jsonl")
    for verb in ("report", "train", "prune"):
        code, output = _do(verb, stranger, capsys)
        assert code == 2
        assert "metrics.jsonl is neither a file nor a folder" in output


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("report", "eval")])
@pytest.mark.parametrize("form", ["absolute", "relative", "through a link"])
def test_checkpoint_folders_elsewhere_are_refused(
    victim: Path, stranger: Path, verb: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = {"absolute": str(victim), "relative": "stranger/../victim", "through a link": "stranger/inside"}[form]
    if form == "through a link":
        (stranger / "inside").symlink_to("../victim")
    (stranger / "config.yaml").write_text(json.dumps({**CONFIG, "checkpoint": {"folder": folder, "keep_last": 1}}))
    before = _contents(victim)
    code, output = _do(verb, stranger, capsys)
    assert code == 2
    assert "outside of the run's folder" in output
    assert _contents(victim) == before
    assert sorted(entry.name for entry in victim.iterdir())[0] == "broken-step-00000001"


def test_a_config_file_of_a_run_cannot_choose_where_to_train(
    victim: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stranger / "config.yaml").write_text(json.dumps({**CONFIG, "run": {"steps": 2, "folder": str(victim)}}))
    assert main(["train", str(stranger / "config.yaml")]) == 2
    assert f"run.folder: {victim} (it is outside of the run's folder)" in capsys.readouterr().err


def test_trackers_notices_and_ports_are_asked_for_before_anything_is_reached(
    tmp_path: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {
        "monitor": {
            "trackers": [{"target": "mlflow", "arguments": {"uri": f"file:{tmp_path}/elsewhere"}}],
            "prometheus": {"address": "0.0.0.0", "port": 0},
        },
        "recovery": {"notice": str(tmp_path / "notice")},
    }
    (tmp_path / "notice").touch()  # would stop the run
    (stranger / "config.yaml").write_text(json.dumps({**CONFIG, **sections}))
    (tmp_path / "state" / "lockstep" / "runs").mkdir(parents=True, mode=0o700)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(stranger)]) == 2
    listed = [line.partition(": ")[0].strip() for line in capsys.readouterr().err.splitlines()[1:-1]]
    assert listed == [
        "recovery.notice",
        "monitor.trackers[0].target",
        "monitor.trackers[0].arguments.uri",
        "monitor.prometheus.address",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_users_own_runs_may_keep_checkpoints_elsewhere(
    tmp_path: Path, victim: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was started here, so its config is the user's own."""
    config = validate({**CONFIG, "checkpoint": {"folder": str(victim), "keep_last": 1}}).config
    (stranger / "config.yaml").write_text(trust.recorded(config, "a" * 32))
    (tmp_path / "link").symlink_to(stranger)
    for run in (stranger, tmp_path / "link"):
        assert main(["ckpt", "ls", str(run)]) == 0
        assert "step-00000003" in capsys.readouterr().out


def test_links_that_stay_inside_are_followed(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stranger / "saved").mkdir()
    (stranger / "checkpoints").symlink_to("saved")
    assert main(["ckpt", "ls", str(stranger)]) == 0
