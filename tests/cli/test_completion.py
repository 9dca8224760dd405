"""Completion in a shell: what the script of `lockstep completion bash` offers in a real bash."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from io import StringIO

import pytest

from lockstep.cli.main import VERBS, main
from lockstep.config.recipes import recipes

LINES = {
    "": set(VERBS),
    "tr": {"train"},
    "ckpt ver": {"verify"},
    "train --fre": {"--fresh"},
    "train digits --optim.l": {"--optim.lr"},
    "train --optim.name adaf": {"adafactor"},
    "plan --batch.glob": {"--batch.global_size"},
    "eval --optim.l": set(),
    "train dig": {"digits"},
    "train digits my": {"my config.yaml"},
    "train --fork my": {"my config.yaml"},
    "export runs/x --format s": {"safetensors"},
    "profile data --optim.l": {"--optim.lr"},
    "launch s": {"slurm", "ssh"},
    "launch slurm --parti": {"--partition"},
    "launch slurm --nodes 2 tr": {"train"},
    "launch slurm ca": {"cancel"},
    "train $(touch x)": set(),
    "train `touch x`": set(),
    "train --fork $(touch x)": set(),
    "train $(touch x) ;touch x": set(),
}


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    folder = tmp_path_factory.mktemp("here")
    (folder / "my config.yaml").touch()
    with redirect_stdout(StringIO()) as script:
        assert main(["completion", "bash"]) == 0
    program = [script.getvalue()]
    for line in ("train ", *LINES):
        words = ["lockstep", *line.split(" ")]
        program.append(f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_lockstep")
        program.append("printf '%s\\n' \"${COMPREPLY[@]}\"; echo ---")
    shown = subprocess.run(
        [bash, "--norc", "--noprofile"],
        input="\n".join(program),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    assert shown.stderr == ""
    assert [file.name for file in folder.iterdir()] == ["my config.yaml"], "nothing that was typed was executed"
    parts = [set(part.split("\n")) - {""} for part in shown.stdout.split("---\n")[:-1]]
    return dict(zip(("train ", *LINES), parts, strict=True))


@pytest.mark.parametrize("line", LINES)
def test_bash_offers(offered: dict[str, set[str]], line: str) -> None:
    assert offered[line] == LINES[line]


def test_recipes_and_files_are_offered_together(offered: dict[str, set[str]]) -> None:
    assert {recipe.name for recipe in recipes()} | {"my config.yaml"} <= offered["train "]


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "'csh'" in capsys.readouterr().err
