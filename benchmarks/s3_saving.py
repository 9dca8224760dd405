"""Measures how long training waits for saves to S3, beside saves to a local disk: `python benchmarks/s3_saving.py`.

A run of one process trains `digits` with 19 MiB of state, and saves after every tenth update, to moto's server in a
process of its own over HTTP on loopback, or to a folder; the two take turns. Reported: the time that training waited
(copies that an update had to wait for), and the time until the checkpoint existed, medians over all saves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit import s3

import lockstep
from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe

RESULTS = Path(__file__).parent / "results" / "s3_saving.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(sender,), daemon=True)
    server.start()
    os.environ.update(s3.environment(receiver.recv()))
    reports: dict[str, list[Any]] = {"folder": [], "s3": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for kind in reports:
                place = f"s3://{s3.BUCKET}/{number}" if kind == "s3" else f"{folder}/checkpoints-{number}"
                reports[kind] += _saves(place, Path(folder) / f"{kind}-{number}")
    server.kill()
    results = {
        kind: {
            "saves": len(saves),
            "waited_ms": round(1000 * statistics.median(save.lost for save in saves), 2),
            "until_it_exists_ms": round(1000 * statistics.median(save.seconds for save in saves), 1),
        }
        for kind, saves in reports.items()
    }
    ratio = results["s3"]["waited_ms"] / results["folder"]["waited_ms"]
    text = json.dumps({"command": f"python benchmarks/s3_saving.py --rounds {arguments.rounds}", **results,
                       "ratio_of_waiting": round(ratio, 3)}, indent=2)  # fmt: skip
    arguments.results.write_text(text + "\n")
    print(text)


class _Reports(lockstep.Monitor):
    def __init__(self) -> None:
        self.saves: list[Any] = []

    def saved(self, report: Any) -> None:
        self.saves.append(report)


def _saves(place: str, run: Path) -> list[Any]:
    """Return the reports of a run's saves, without the first, which allocates memory, and the last."""
    monitor = _Reports()
    overrides = [
        "model.width=176", "run.epochs=null", "run.steps=61", "evaluation.every=null", "evaluation.at_end=false",
        "monitor.progress=none", "monitor.tensorboard=false", "launch.device=cpu", "checkpoint.every=10 steps",
        f"checkpoint.folder={place}", f"run.folder={run}",
    ]  # fmt: skip
    config = load([resolve_recipe("digits").path], overrides).config
    lockstep.train(config, ranks=1, monitors=[monitor])
    return monitor.saves[1:-1]


def _serve(sender: Any) -> None:
    with s3.serving() as address:
        sender.send(address)
        import time

        time.sleep(100_000)


if __name__ == "__main__":
    main()
