"""The command `lockstep doctor`: its output, exit codes and JSON."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from kit.commands import run_lockstep


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
    assert "ports are 1 to 65535" in done.stderr
