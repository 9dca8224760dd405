"""Values with signs of a shell, of YAML and of no script: each reaches the program as it is, or is refused."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli.main import main

ODD = [
    "a b",
    "it's",
    '"',
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED",
    "größe",
    "*",
    "# x",
    "\\",
    "a: b",
    "&a",
    "~",
]
BROKEN = ["a\nb", "a\n#SBATCH --x\ntouch PWNED", "\x85", "\u2028", "\x07", "\t"]
STUBS = """
srun() { printf '%s\\0' "$@" >>srun; }
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_words_reach_programs_of_slurm_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    passed = [f"--srun=--x={text}" for text in ODD]
    train = ["train", "digits", f"run.folder=r/{ODD[3]}"]
    program = ["--program", shlex.join(ODD), "--container-image", "; touch PWNED"]
    script = dry_run(capsys, "slurm", "--dry-run", *passed, *program, *train)
    subprocess.run(["bash", "-c", STUBS + script], check=True)
    words = Path("srun").read_text().split("\0")[:-1]
    assert "--container-image=; touch PWNED" in words
    assert [*(f"--x={text}" for text in ODD), *ODD, *train] == words[-2 * len(ODD) - len(train) :]
    assert not Path("PWNED").exists()


@pytest.mark.parametrize(
    "words", [["docker", "--image", "me/train:1"], ["kubernetes", "--image", "me/train:1", "--volume", "w:/w"]]
)
def test_values_survive_yaml(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*ODD, *BROKEN, "null", "1e5", "yes", "0x1f", "{}", "${HOME}", ""]
    variables = [f"--env=V{number}={text}" for number, text in enumerate(texts)]
    program = ["--program", shlex.join(["lockstep", *ODD])]
    folder = f"run.folder=r/{BROKEN[1]}"
    written = dry_run(capsys, words[0], "--dry-run", *words[1:], *variables, *program, "train", "digits", folder)
    service: Any = list(yaml.safe_load_all(written))[-1]
    if words[0] == "docker":
        service = service["services"]["node0"]
        values, command, entrypoint = service["environment"], service["command"], service["entrypoint"]
    else:
        [service] = service["spec"]["template"]["spec"]["containers"]
        values, command = {each["name"]: each["value"] for each in service["env"]}, service["args"]
        entrypoint = service["command"]
    doubled = {"docker": ("$", "$$"), "kubernetes": ("$(", "$$(")}[words[0]]
    assert [values[f"V{number}"] for number in range(len(texts))] == [text.replace(*doubled) for text in texts]
    assert command[-1] == folder
    assert entrypoint[1:] == [text.replace(*(doubled if words[0] == "docker" else ("", ""))) for text in ODD]


@pytest.mark.parametrize("flag", ["--partition", "--account", "--program", "--sbatch"])
def test_what_a_script_can_not_hold_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in BROKEN:
        value = f"--reservation={text}" if flag == "--sbatch" else f"x{text}x"
        assert main(["launch", "slurm", "--dry-run", f"{flag}={value}", "train", "digits"]) == 2
        assert capsys.readouterr().err.startswith(
            ("lockstep: " + flag, f"lockstep: '{flag}=", "lockstep: '--reservation")
        )


def test_a_configs_name_is_no_line_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a\ntouch PWNED.yaml").write_text((Path(__file__).parents[2] / "recipes" / "digits.yaml").read_text())
    script = dry_run(capsys, "slurm", "--dry-run", "train", "a\ntouch PWNED.yaml", "run.folder=r")
    assert [line for line in script.splitlines() if line.startswith("touch")] == ["touch PWNED.yaml' run.folder=r)"]
    subprocess.run(["bash", "-c", STUBS + script], check=True)
    assert "a\ntouch PWNED.yaml" in Path("srun").read_text()
