"""The README's table of places: each command is one that `--dry-run`, or the check of a config, accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.launchers import BUILTIN, aws

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text().partition("## From one machine to many")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"\| `(.+?)` \|", SECTION)
LAUNCHES = [command for command in COMMANDS if command.startswith("lockstep launch ")]


def test_each_launcher_has_its_row() -> None:
    assert sorted(command.split()[2] for command in LAUNCHES) == sorted(BUILTIN)


@pytest.mark.parametrize("command", LAUNCHES)
def test_the_command_can_be_launched(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")  # which a user of AWS has configured
    monkeypatch.setattr(aws, "facts_of", lambda calls, options: aws.AwsFacts("ami-1", "/dev/sda1"))
    where, rest = command.split(maxsplit=3)[2:]
    assert main(["launch", where, "--dry-run", *shlex.split(rest)]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("lockstep train ")])
def test_the_command_is_a_config(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in shlex.split(command)[2:] if word != "--ranks"]
    flags = [word for word in words[1:] if not word.isdecimal() or words[words.index(word) - 1] == "--nodes"]
    renamed = {"--nodes": "--launch.nodes", "--rendezvous": "--launch.rendezvous"}
    assert main(["config", "check", words[0], *(renamed.get(flag, flag) for flag in flags)]) == 0
