"""A rank under an elastic launcher that fails where a plan has it, and sums over all ranks where it doesn't.

elastic_program.py FOLDER PLAN      PLAN: for each attempt, the ranks' ends, ok, raise, kill or idle: "idle,kill ok,ok"
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from lockstep.config.schema import Launch
from lockstep.distributed.process_group import joined


def main(folder: Path, plan: str) -> None:
    rounds = [attempt.split(",") for attempt in plan.split()]
    with joined(Launch(device="cpu", timeout=30.0), grouped=True) as world:
        seen = folder / f"rank-{world.rank}"
        attempt = int(seen.read_text()) if seen.exists() else 0
        seen.write_text(str(attempt + 1))
        total = int(world.axis.sum(torch.ones(1)).item())
        assert world.axis.gather(attempt) == [attempt] * world.size
        kept = world.launcher_store
        if kept is not None and world.rank == 0:
            earlier = kept.get("attempts").decode() if kept.check(["attempts"]) else ""
            kept.set("attempts", f"{earlier}{attempt}")
        match rounds[attempt][world.rank]:
            case "raise":
                raise ValueError(f"planned, in attempt {attempt}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "idle":
                time.sleep(120.0)  # until the agent ends it for the others
        world.axis.barrier()
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        kept_attempts = kept.get("attempts").decode() if kept is not None else "-"
        (folder / f"done-{world.rank}").write_text(f"{attempt} {total} {count} {kept_attempts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
