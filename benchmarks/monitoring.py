"""Measures what monitoring costs an update of about 50 ms: `python benchmarks/monitoring.py`.

    off    no meters, no TensorBoard, no progress, a line of metrics.jsonl at the first and the last update
    on     meters with a line of ranks.jsonl a second, TensorBoard and metrics.jsonl at every update, plain progress

Both train `digits` in one process, and as DDP on two ranks over gloo. An update's time is from one report to the next,
on the first rank: the median and the mean of the middle nine tenths over a run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds

import lockstep

STEPS, FIRST = 240, 20  # updates of a run, and of those the first, which aren't counted
SETTINGS = {"one process": 1, "DDP on two ranks": 2}
SWITCHES = {
    "off": ["monitor.meter_seconds=0", "monitor.tensorboard=false", "monitor.progress=none", "monitor.every=100000"],
    "on": ["monitor.meter_seconds=1", "monitor.tensorboard=true", "monitor.progress=plain", "monitor.every=1"],
}
FIGURES = {"median_ms": "median of an update, ms", "mean_ms": "mean of an update, ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        report(be_contestant(arguments.contestant))
        return
    machine = about_here(("torch",))
    rows: dict[str, Any] = {}
    for setting, ranks in SETTINGS.items():
        runs, refused = interleaved(
            list(SWITCHES),
            arguments.rounds,
            lambda name, ranks=ranks: in_processes(__file__, ["--contestant", name], ranks),
        )
        if refused:
            sys.exit(f"{setting}: {refused}")
        ratios = {key: within_rounds(runs["on"], runs["off"], key, lambda a, b: a / b) for key in FIGURES}
        figures = {name: {key: Spread.over([run[key] for run in of]) for key in FIGURES} for name, of in runs.items()}
        rows[setting] = {**figures, "on relative to off": ratios}
    results = {
        "command": f"python benchmarks/monitoring.py --rounds {arguments.rounds}",
        "rounds": arguments.rounds,
        "machine": machine,
        "rows": rows,
    }
    if arguments.rounds >= 3:
        save("monitoring", results)
    print(table(results))


class _Watch(lockstep.Monitor):
    """Notes when each update's report came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def see(self, report: Any) -> tuple[()]:
        self.times.append(time.perf_counter())
        return ()


def be_contestant(name: str) -> dict[str, float]:
    """Return the times of a run's updates."""
    from lockstep.config.loading import load
    from lockstep.config.recipes import resolve_recipe

    watch = _Watch()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory(prefix="monitoring-") as folder:
        overrides = [
            "model.width=176", f"batch.global_size={16 * ranks}", "run.epochs=null", f"run.steps={STEPS}",
            "evaluation.every=null", "evaluation.at_end=false", "launch.device=cpu", f"run.folder={folder}/run",
            "precision.compute=fp32", f"parallel.strategy={'single' if ranks == 1 else 'ddp'}", *SWITCHES[name],
        ]  # fmt: skip
        lockstep.train(load([resolve_recipe("digits").path], overrides).config, monitors=[watch])
    times = watch.times
    seconds = sorted(later - earlier for earlier, later in zip(times[FIRST:], times[FIRST + 1 :], strict=False))
    if not seconds:  # another rank than the first
        return {}
    cut = len(seconds) // 20
    return {
        "median_ms": 1000 * statistics.median(seconds),
        "mean_ms": 1000 * statistics.fmean(seconds[cut : len(seconds) - cut]),
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `main` measured or results/monitoring.json holds."""
    rows = [
        [f"{setting}: {name}", *(_spread(figures[key]).text("{:,.3f}") for key in FIGURES)]
        for setting, of in results["rows"].items()
        for name, figures in of.items()
    ]
    return f"{markdown(['', *FIGURES.values()], rows)}\n\n{provenance(results)}"


def _spread(value: Any) -> Spread:
    return value if isinstance(value, Spread) else Spread(**value)


if __name__ == "__main__":
    main()
