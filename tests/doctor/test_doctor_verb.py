"""The command `lockstep doctor`: its output, exit codes and JSON."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.cli import doctor
from lockstep.cli.main import main


def test_the_command_names_a_taken_port_and_exits_with_3(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run_lockstep("doctor", "--port", port, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "wrong: port" in done.stdout
    assert "-> End that process" in done.stdout
    assert done.stdout.index("wrong: port") < done.stdout.index("ok        Python")


def test_json_has_every_finding(tmp_path: Path) -> None:
    done = run_lockstep("doctor", "--json", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path), RANK="5", WORLD_SIZE="2")
    content = json.loads(done.stdout)
    wrong = [finding for finding in content["findings"] if finding["state"] == "wrong"]
    assert (done.returncode, content["wrong"]) == (3, len(wrong))
    assert {finding["name"] for finding in wrong} >= {"rank variables"}
    assert all(finding["remedy"] for finding in wrong)


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    done = run_lockstep("doctor", "--port", "70000", cwd=tmp_path)
    assert done.returncode == 2
    assert gives(done.stderr, 1, 65535)


PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_of_the_page_is_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, verb, *words = shlex.split(line)
    assert program == "lockstep"
    if verb == "launch":
        assert main([verb, words[0], "--dry-run", *words[1:]]) == 0, capsys.readouterr().err
    else:
        assert verb == "doctor"
        assert doctor.prepare(words).name == "doctor"


def test_flags_of_several_hosts_need_nodes(tmp_path: Path) -> None:
    done = run_lockstep("doctor", "--ranks", 1, "--rendezvous", "a:29500", cwd=tmp_path)
    assert done.returncode == 2
    assert gives(done.stderr, "--rendezvous", "--nodes")
