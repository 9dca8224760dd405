"""Ranks that an elastic launcher restarts on several nodes meet again, though each node counts restarts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kit.worlds import free_port

PROGRAM = Path(__file__).with_name("elastic_program.py")


def run_nodes(folder: Path, plan: str, rendezvous: str) -> list[list[str]]:
    """Run a rank on each of two of torchrun's agents; return what the ranks of the last attempt have written."""
    port = free_port()
    meeting = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
    }[rendezvous]
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*common, "--max-restarts", "4", "--node-rank", str(node), *meeting, str(PROGRAM), str(folder), plan],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    return [(folder / f"done-{rank}").read_text().split() for rank in range(2)]


def test_nodes_that_count_restarts_differently_meet(tmp_path: Path) -> None:
    """Before, a rank named its round by its own node's count, and waited for others where they never came."""
    first, second = run_nodes(tmp_path, "idle,kill ok,ok", "c10d")
    assert [first[:3], second[:3]] == [["1", "2", "0"], ["1", "2", "1"]], "a node counts the failures of its own ranks"
    assert first[3] == "01", "the launcher's store outlives the ranks"
