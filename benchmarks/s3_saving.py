"""Measures what saves to S3 cost a training, beside saves to a local disk: `python benchmarks/s3_saving.py`.

    a run of one process trains `digits`; every save has 19 MiB; stretches of steps with a save at their start alternate
    with stretches without, so that each figure is a difference within one process
    a folder    on this machine's disk
    s3          moto's server in a process of its own, over HTTP on loopback, on the same cores

Training lost is how much longer the steps after a save take; waited is the part of it in which an update stood still.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit import s3
from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds

import lockstep

PLACES = ("a folder", "s3")
STRETCH, PAIRS = 60, 6  # steps of a stretch; stretches with a save, the first of which isn't counted
FIGURES = {"lost_ms": "training lost per save, ms", "waited_ms": "of it waited, ms", "exists_ms": "ms until it exists"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        report(be_contestant(arguments.contestant))
        return
    machine = about_here(("torch", "obstore", "moto"))
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(sender,), daemon=True)
    server.start()
    os.environ.update(s3.environment(receiver.recv()))
    try:
        runs, refused = interleaved(PLACES, arguments.rounds, _run)
    finally:
        server.kill()
    results = {
        "command": f"python benchmarks/s3_saving.py --rounds {arguments.rounds}",
        "rounds": arguments.rounds,
        "machine": machine,
        "rows": {name: {key: Spread.over([run[key] for run in of]) for key in of[0]} for name, of in runs.items()},
        "ratios": {key: within_rounds(runs["s3"], runs["a folder"], key, lambda a, b: a / b) for key in FIGURES},
        "refused": refused,
    }
    if arguments.rounds >= 3:
        save("s3_saving", results)
    print(table(results))


def _run(name: str) -> Mapping[str, float]:
    return in_processes(__file__, ["--contestant", name], 1)


class _Watch(lockstep.extend.Monitor):
    """Notes when each update ended, and the reports of the saves."""

    def __init__(self) -> None:
        self.saves: list[Any] = []
        self.times: list[float] = []

    def see(self, report: Any) -> tuple[()]:
        self.times.append(time.perf_counter())
        return ()

    def saved(self, report: Any) -> None:
        self.saves.append(report)


def be_contestant(name: str) -> dict[str, float]:
    """Return a run's figures: medians over its saves, without the first, which allocates memory, and the last."""
    from lockstep.config.loading import load
    from lockstep.config.recipes import resolve_recipe

    watch = _Watch()
    steps = 2 * STRETCH * PAIRS
    with tempfile.TemporaryDirectory(prefix="s3-saving-") as folder:
        place = f"s3://{s3.BUCKET}/{uuid.uuid4().hex}" if name == "s3" else f"{folder}/checkpoints"
        overrides = [
            "model.width=176", "batch.global_size=8", "run.epochs=null", f"run.steps={steps + 1}",
            "evaluation.every=null", "evaluation.at_end=false", "monitor.progress=none", "monitor.tensorboard=false",
            "launch.device=cpu", f"checkpoint.every={2 * STRETCH} steps", f"checkpoint.folder={place}",
            f"run.folder={folder}/run",
        ]  # fmt: skip
        config = load([resolve_recipe("digits").path], overrides).config
        lockstep.train(config, monitors=[watch])
    starts = [2 * STRETCH * pair - 1 for pair in range(1, PAIRS)]  # of the update after which a save starts
    times = watch.times
    lost = [
        (times[at + STRETCH] - times[at]) - (times[at] - times[at - STRETCH]) for at in starts[1:]
    ]  # after the save, and before it
    saves = watch.saves[1:-1]
    assert len(times) == steps + 1, f"{len(times)} updates of {steps + 1}"
    return {
        "lost_ms": 1000 * statistics.median(lost),
        "waited_ms": 1000 * statistics.median(each.lost for each in saves),
        "exists_ms": 1000 * statistics.median(each.seconds for each in saves),
        "step_ms": 1000 * statistics.median(times[at] - times[at - STRETCH] for at in starts) / STRETCH,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `main` measured or results/s3_saving.json holds."""

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [_spread(row[key]).text("{:,.2f}") for key in FIGURES]

    rows = [[name, *cells(row), f"{_spread(row['step_ms']).median:.1f}"] for name, row in results["rows"].items()]
    rows.append(["s3 relative to a folder", *cells(results["ratios"]), ""])
    return f"{markdown(['', *FIGURES.values(), 'a step, ms'], rows)}\n\n{provenance(results)}"


def _spread(value: Any) -> Spread:
    return value if isinstance(value, Spread) else Spread(**value)


def _serve(sender: Any) -> None:
    with s3.serving() as address:
        sender.send(address)
        time.sleep(100_000)


if __name__ == "__main__":
    main()
