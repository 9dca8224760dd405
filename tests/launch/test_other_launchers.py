"""The same program runs unchanged under other launchers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("rank_program.py")
LAUNCHERS = {
    "itself": [sys.executable, str(PROGRAM)],
    "torch.distributed.launch": [
        sys.executable,
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node",
        "2",
        str(PROGRAM),
    ],
}


def _run(command: list[str], **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parent), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_two_ranks_under_each_launcher(command: list[str]) -> None:
    out = _run(command)
    assert sorted(out.splitlines()) == [f"rank {rank} of 2, local {rank} of 2: 2" for rank in range(2)]


def test_two_ranks_with_deepspeeds_variables() -> None:
    """DeepSpeed's launcher sets LOCAL_SIZE, and inserts --local_rank=N after the program."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), f"--local_rank={rank}"],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [process.communicate(timeout=120)[0] for process in processes]
    assert outs == [f"rank {rank} of 2, local {rank} of 2: 2\n" for rank in range(2)]
