"""A misspelled run folder is answered with the run that is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import run_lockstep

from lockstep.core.near_runs import nearest_run

VERBS = ["ls", "doctor", "explain", "report", "eval", "profile", "top", "compare", "ckpt ls", "verify", "train"]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "digits"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    (tmp_path / "runs" / "digit").mkdir()  # no run
    return run


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_offers_the_run_that_is_meant(digits: Path, verb: str) -> None:
    done = run_lockstep(*verb.split(), "runs/digts", cwd=digits.parent.parent)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("did you mean runs/digits?") or f"did you mean {digits}?" in done.stderr


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("runs/digts", "runs/digits"),
        ("digits", "runs/digits"),
        ("rusn/digits", "runs/digits"),
        ("runs/digit", "runs/digits"),
        ("runs/other", None),
        ("runs/digits", None),
    ],
)
def test_the_nearest_run(digits: Path, monkeypatch: pytest.MonkeyPatch, path: str, near: str | None) -> None:
    monkeypatch.chdir(digits.parent.parent)
    assert nearest_run(Path(path)) == (None if near is None else Path(near))
