"""The health check of a container, on process tables and on a launcher that waits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from kit.commands import start_lockstep
from kit.worlds import free_port

from lockstep.launchers import docker_health

INIT, LAUNCHER, RANK = "/sbin/docker-init", "/opt/venv/bin/python3", "/opt/venv/bin/python3"
RELAY = "/opt/venv/bin/python3 -c from lockstep.launch.relay import main"


def table(folder: Path, *processes: tuple[int, int, str, str]) -> Path:
    """Write a /proc of processes: number, parent, program, state."""
    for number, parent, program, state in processes:
        place = folder / str(number)
        place.mkdir()
        (place / "stat").write_text(f"{number} (a b) c) {state} {parent} 1 1 0 -1\n")
        (place / "cmdline").write_bytes(b"\0".join([*(word.encode() for word in program.split(" ")), b"lockstep"]))
    (folder / "self").mkdir()
    return folder


@pytest.mark.parametrize(
    ("processes", "code", "text"),
    [
        ([(1, 0, INIT, "S"), (7, 1, LAUNCHER, "S"), (8, 7, RANK, "R"), (9, 7, RANK, "R")], 0, "2 ranks run"),
        ([(1, 0, LAUNCHER, "S"), (8, 1, RANK, "R"), (99, 0, RANK, "R")], 0, "1 ranks run"),
        ([(1, 0, INIT, "S"), (7, 1, LAUNCHER, "S"), (99, 0, RANK, "R")], 1, "no rank runs: the launcher starts them"),
        ([(1, 0, INIT, "S"), (7, 1, LAUNCHER, "S"), (8, 7, RANK, "Z")], 1, "no rank runs"),
        ([(1, 0, LAUNCHER, "S"), (8, 1, RELAY, "S")], 1, "no rank runs"),
        ([(1, 0, LAUNCHER, "S"), (8, 1, RELAY, "S"), (9, 1, RANK, "R")], 0, "1 ranks run"),
        ([(1, 0, INIT, "S")], 1, "no launcher runs"),
    ],
)
def test_it_is_healthy_once_its_ranks_run(
    processes: list[tuple[int, int, str, str]],
    code: int,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert docker_health.main(table(tmp_path, *processes)) == code
    assert capsys.readouterr().out.startswith(text)


def test_a_launcher_that_waits_for_other_nodes_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--node-rank", "0"]
    node = start_lockstep("train", "digits", *hosts, cwd=tmp_path)
    node.wait_for(lambda: node.ranks and docker_health.main(first=node.pid) == 1)  # its relay runs
    assert "no rank runs: the launcher starts them, or waits for other nodes\n" in capsys.readouterr().out
    node.send(signal.SIGINT)
    assert node.end() == 130
