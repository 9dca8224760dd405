"""A link between two hosts that is slow for real: `tc` limits what one of them sends to 20 Mbit/s."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.hosts import needs_hosts, network

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = (
    "train", "examples/squares.yaml", "--ranks", 1, "--nodes", 2, "--rendezvous", "host-0:29500",
    "model.arguments.width=20000", "run.epochs=null", "run.steps=12", "run.folder=run", "launch.device=cpu",
    "precision.compute=fp32", "evaluation.at_end=false", "recovery.restarts=0", "profile.steps=6..8",
    "profile.ranks=all",
)  # fmt: skip
TOKEN = {"LOCKSTEP_JOB_TOKEN": "a token that only the hosts know"}


@needs_hosts
@pytest.mark.drill
def test_explain_and_profile_name_it(tmp_path: Path) -> None:
    """An update sends 234 KiB, which take 94 ms at 20 Mbit/s, and computes for a few milliseconds."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    with network(2, tmp_path) as net:
        net.slow(1)
        launchers = [net.start(host, *RUN, "--node-rank", host, cwd=tmp_path, **TOKEN) for host in (0, 1)]
        assert [launcher.end() for launcher in launchers] == [0, 0], launchers[0].output
    explained = run_lockstep("explain", "run", "--json", cwd=tmp_path)
    first = json.loads(explained.stdout)["limits"][0]
    assert first["name"] == "communication"
    assert first["share"] > 0.5
    assert "faster links" in first["remedy"]
    profiled = run_lockstep("profile", "run", cwd=tmp_path).stdout
    limits = profiled.partition("what limits it\n")[2]
    assert "for other ranks" in limits.splitlines()[0]
    assert "batch.global_size" in limits.splitlines()[1]
