"""Completion in shells: what they offer, and its cost."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import complete, completion_table
from lockstep.cli.main import VERBS, main
from lockstep.config.recipes import recipes

TABLE = Path(complete.__file__).with_name("completion.json")


def test_the_committed_table_is_current() -> None:
    assert json.loads(TABLE.read_text()) == completion_table.table(), (
        "python -m lockstep.cli.completion_table > src/lockstep/cli/completion.json"
    )


def _offered(*words: str) -> list[str]:
    *before, current = words
    return list(complete.answer(before, current).words)


def test_every_verb_and_recipe_is_offered() -> None:
    assert set(VERBS) < set(_offered(""))
    assert {recipe.name for recipe in recipes()} <= set(_offered("train", ""))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tr", ["train"]),
        ("ckpt ver", ["verify"]),
        ("config check --ra", ["--ranks"]),
        ("train --fre", ["--fresh"]),
        ("train --ranks ", ["auto"]),
        ("train digits --ranks=a", ["--ranks=auto"]),
        ("export runs/x --format s", ["safetensors"]),
        ("init fine", ["finetune"]),
        ("completion z", ["zsh"]),
        ("train op", ["optim."]),
        ("train digits --optim.l", ["--optim.lr="]),
        ("train digits optim.l", ["optim.lr="]),
        ("train --optim.name=adaf", ["--optim.name=adafactor"]),
        ("train optim.name=adaf", ["optim.name=adafactor"]),
        ("train --optim.name adaf", ["adafactor"]),
        ("train data.evaluation.held-out.kin", ["data.evaluation.held-out.kind="]),
        ("train data.evaluation.$(x).kin", []),
        ("eval --optim.l", []),
        ("nothing --fr", []),
        ("launch s", ["slurm", "ssh"]),
        ("launch slurm --parti", ["--partition"]),
        ("launch slurm --nodes 2 tr", ["train"]),
        ("launch slurm --exclusive --nodes 2 train --fre", ["--fresh"]),
        ("launch slurm --container a", ["apptainer"]),
        ("launch slurm ca", ["cancel"]),
    ],
)
def test_what_is_offered(line: str, offered: list[str]) -> None:
    assert _offered(*line.split(" ")) == offered


def test_a_flag_is_offered_once() -> None:
    assert "--fresh" not in _offered("train", "--fresh", "--")


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("train ", True),
        ("eval ", True),
        ("eval runs/x ", False),
        ("train x --fork ", True),
        ("train --fork=", True),
        ("train --ranks ", False),
        ("train run.folder=", True),
        ("train optim.lr=", False),
        ("recipes ", False),
    ],
)
def test_files_are_offered_for_paths(line: str, files: bool) -> None:
    *before, current = line.split(" ")
    assert complete.answer(before, current).files == files


def test_a_keypress_imports_light_modules_only() -> None:
    program = "import sys; sys.argv = ['x', 'bash', 'train', '--optim.']\nimport runpy\n"
    program += "runpy.run_module('lockstep.cli.complete', run_name='__main__')\n"
    program += "print({'torch', 'pydantic', 'yaml', 'argparse', 'numpy', 'lockstep.config'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert any(line.startswith("--optim.lr=\t") for line in done.stdout.splitlines())


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "'csh'" in capsys.readouterr().err


# --- the shells themselves ------------------------------------------------------------------------------------------


def _shell(name: str, tmp_path: Path) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed here")
    done = subprocess.run([sys.executable, "-m", "lockstep", "completion", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / f"script.{name}").write_text(done.stdout)
    return path


def _run(path: str, options: list[str], program: str, folder: Path) -> str:
    done = subprocess.run([path, *options, "-c", program], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


HOSTILE = (
    "$(touch hacked)",
    "`touch hacked`",
    "'$(touch hacked)",
    '"$(touch hacked)',
    "x;touch hacked",
    "data.$(touch hacked).",
)


def _bash(path: str, folder: Path, cases: list[list[str]]) -> list[list[str]]:
    """Return COMPREPLY for each list of COMP_WORDS, whose last word is completed."""
    lines = ["source script.bash"]
    for words in cases:
        lines.append(f"COMP_WORDS=({shlex.join(['lockstep', *words])}); COMP_CWORD={len(words)}")
        lines.append("COMPREPLY=(); _lockstep; printf '%s\\n' \"${COMPREPLY[@]}\"; echo ---")
    printed = _run(path, ["--norc", "--noprofile"], "\n".join(lines), folder)
    return [part.strip("\n").split("\n") for part in printed.split("---\n")[:-1]]


def test_bash(tmp_path: Path) -> None:
    path = _shell("bash", tmp_path)
    (tmp_path / "my config.yaml").touch()
    result = _bash(
        path,
        tmp_path,
        [
            ["tra"],
            ["train", "--fre"],
            ["train", "optim.l"],
            ["train", "--optim.name", "=", "adaf"],  # as bash divides --optim.name=adaf
            ["train", "--optim.name", "="],
            ["train", "digits", "--ranks", "="],
            ["export", "'my run'", "--format", '"s'],
            ["train", "dig"],
            ["train", "digits", "my"],
        ],
    )
    assert result[:4] == [["train"], ["--fresh"], ["optim.lr="], ["adafactor"]]
    assert {"adamw", "sgd"} <= set(result[4])
    assert result[5:8] == [["auto"], ["safetensors"], ["digits"]]
    assert result[8] == [""]  # left to readline, which knows how to quote


def test_bash_runs_nothing_that_is_typed(tmp_path: Path) -> None:
    path = _shell("bash", tmp_path)
    cases = [[*words, odd] for odd in HOSTILE for words in ([], ["train"], ["train", "--fork"], ["train", odd])]
    _bash(path, tmp_path, cases)
    assert [file.name for file in tmp_path.iterdir()] == ["script.bash"]


def test_zsh(tmp_path: Path) -> None:
    path = _shell("zsh", tmp_path)
    program = "compdef() { :; }; _files() { print -r -- FILES $PREFIX; }; compset() { :; }\n"
    program += 'compadd() { print -r -- "${(P@)@[-1]}"; }\nsource script.zsh\n'
    cases = [["tra"], ["train", "--optim.name=adaf"], ["train", "dig"], ["export", "'my run'", "--format", "s"]]
    cases += [["train", odd] for odd in HOSTILE]
    for words in cases:
        program += f"words=({shlex.join(['lockstep', *words])}); CURRENT={len(words) + 1}; _lockstep; print -r -- ---\n"
    parts = [part.split("\n")[:-1] for part in _run(path, ["-f"], program, tmp_path).split("---\n")]
    assert parts[:4] == [["train"], ["--optim.name=adafactor"], ["digits", "FILES"], ["safetensors"]]
    assert [file.name for file in tmp_path.iterdir()] == ["script.zsh"]


def test_fish(tmp_path: Path) -> None:
    path = _shell("fish", tmp_path)
    (tmp_path / "my config.yaml").touch()
    lines = ["tra", "train --optim.name=adaf", "train my", "train --fork=my", "export x --format s"]
    program = "source script.fish\n"
    for line in [*lines, *(f"train {odd}" for odd in HOSTILE)]:
        program += f"complete -C {_fish_quoted('lockstep ' + line)}; echo ---\n"
    home = tmp_path / "home"
    program = f"set -x HOME {home}\n{program}"
    parts = [part.split("\n")[:-1] for part in _run(path, ["--no-config"], program, tmp_path).split("---\n")]
    assert parts[0] == ["train\ttrain a recipe or a config file"]
    assert [part[0].split("\t")[0] for part in parts[1:5]] == [
        "--optim.name=adafactor", "my config.yaml", "--fork=my config.yaml", "safetensors",
    ]  # fmt: skip
    assert not (tmp_path / "hacked").exists()


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
