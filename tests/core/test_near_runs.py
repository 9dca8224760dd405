"""A misspelled run folder is answered with the run that is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.config.recipes import resolve_recipe
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


FOREIGN = {
    "out/checkpoint-5": "`lockstep ckpt import out/checkpoint-5 RUN --config FILE`",
    "out": "name one, out/checkpoint-10",
    "last.pt": "`lockstep ckpt import last.pt RUN --config FILE`",
    "zero": "`lockstep ckpt import zero RUN --config FILE`",
    "zero/mp_rank_00_model_states.pt": "name its folder, zero",
    "adapter": "merge_and_unload",
}


@pytest.mark.parametrize(
    "words", ["train PLACE", "train run --from PLACE", "ckpt ls PLACE", "export PLACE", "eval PLACE"]
)
@pytest.mark.parametrize("place", FOREIGN)
def test_checkpoints_of_other_programs_are_answered_with_their_import(
    words: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "out/checkpoint-5/model.safetensors", "out/checkpoint-10/model.safetensors", "last.pt",
        "zero/mp_rank_00_model_states.pt", "adapter/adapter_config.json",
    ):  # fmt: skip
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert main(words.replace("PLACE", place).split()) != 0
    assert FOREIGN[place] in capsys.readouterr().err.replace(str(tmp_path) + "/", "")


def test_a_name_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--from", "checkpoint-5"]) == 2
    assert gives(capsys.readouterr().err, "lockstep ckpt import CHECKPOINT RUN --config FILE")


def test_a_recipe_is_not_shadowed_by_a_folder_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "model.safetensors").touch()
    assert resolve_recipe("digits").name == "digits"
