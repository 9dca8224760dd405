"""The same program runs unchanged under other launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.commands import Done, run_script
from kit.worlds import free_port

PROGRAM = Path(__file__).with_name("rank_program.py")


def test_it_starts_its_ranks_itself(tmp_path: Path) -> None:
    _assert_two_ranks(run_script(PROGRAM, cwd=tmp_path).stdout)


def test_two_ranks_under_torch_distributed_launch() -> None:
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2", str(PROGRAM)]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _assert_two_ranks(done.stdout)


def test_two_ranks_with_deepspeeds_variables(tmp_path: Path) -> None:
    """DeepSpeed's launcher sets LOCAL_SIZE, and inserts --local_rank=N after the program."""
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank: int) -> Done:
        place = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_script(PROGRAM, f"--local_rank={rank}", cwd=tmp_path, **place)

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(run, range(2)))
    assert [rank.returncode for rank in done] == [0, 0], done
    _assert_two_ranks("".join(rank.stdout for rank in done))


def _assert_two_ranks(out: str) -> None:
    assert sorted(out.splitlines()) == [f"rank {rank} of 2, local {rank} of 2: 2" for rank in range(2)]
