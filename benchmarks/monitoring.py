"""Measures what monitoring costs an update of about 50 ms: `python benchmarks/monitoring.py`.

    off        no meters, no TensorBoard, no progress, a line of metrics.jsonl at the first and the last update
    default    a config without a section `monitor`: meters with a line of ranks.jsonl each 10 s, TensorBoard and
               metrics.jsonl each 10 updates
    on         meters with a line of ranks.jsonl a second; TensorBoard, metrics.jsonl, a Prometheus endpoint that is
               read each second and a tracker at every update; plain progress

All train `digits`: in one process, as DDP on two ranks over gloo, and in one process whose updates wait for 45 ms, as
the host of an accelerator does. There the difference in processor time is that of monitoring alone; in the others the
training's own processor time varies by more than that. An update's time is from one report to the next, on the first
rank: the median, and the mean of the middle nine tenths over a run. Processor times are means over the same updates:
those of the thread that trains, and of the whole process with its threads.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds

import lockstep

STEPS, FIRST = 200, 20  # updates of a run, and of those the first, which aren't counted
WAIT_S = 0.045
SETTINGS = {"one process": 1, "DDP on two ranks": 2, "one process that waits": 1}
PORT = 19_470
SWITCHES = {
    "off": ["monitor.meter_seconds=0", "monitor.tensorboard=false", "monitor.progress=none", "monitor.every=100000"],
    "default": [],
    "on": [
        "monitor.meter_seconds=1",
        "monitor.tensorboard=true",
        "monitor.progress=plain",
        "monitor.every=1",
        f"monitor.prometheus={{port: {PORT}}}",
    ],
}
FIGURES = {
    "median_ms": "median of an update, ms",
    "mean_ms": "mean of an update, ms",
    "main_ms": "processor time of the training thread, ms",
    "process_ms": "processor time of the process, ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    parser.add_argument("--wait", action="store_true", help="the contestant's updates wait")
    parser.add_argument("--only", choices=list(SETTINGS), help="measure in this setting alone")
    arguments = parser.parse_args()
    if arguments.contestant:
        report(be_contestant(arguments.contestant, WAIT_S if arguments.wait else 0.0))
        return
    results = compared("monitoring", SWITCHES, measured, arguments.rounds, arguments.only)
    print(table(results))


def compared(
    name: str, contestants: Iterable[str], measure: Callable[..., Mapping[str, float]], rounds: int, only: str | None
) -> dict[str, Any]:
    """Return what each contestant measured in each setting, and how it differs from the first; 3 rounds are saved."""
    machine = about_here(("torch",))
    first, *others = contestants
    rows: dict[str, Any] = {}
    for setting, ranks in SETTINGS.items():
        if only not in (None, setting):
            continue
        waits = ["--wait"] if setting.endswith("waits") else []
        runs, refused = interleaved([first, *others], rounds, functools.partial(measure, ranks=ranks, options=waits))
        if refused:
            sys.exit(f"{setting}: {refused}")
        keys = list(runs[first][0])
        rows[setting] = {
            each: {key: Spread.over([run[key] for run in of]) for key in keys} for each, of in runs.items()
        }
        for other in others:
            rows[setting][f"{other} minus {first}"] = {
                key: within_rounds(runs[other], runs[first], key, lambda a, b: a - b) for key in keys
            }
    results = {
        "command": f"python benchmarks/{name}.py --rounds {rounds}" + (f" --only '{only}'" if only else ""),
        "rounds": rounds,
        "machine": machine,
        "load_after": round(os.getloadavg()[0], 2),
        "rows": rows,
    }
    if rounds >= 3:
        save(name, results)
    return results


def measured(name: str, ranks: int, options: list[str]) -> Mapping[str, float]:
    return in_processes(__file__, ["--contestant", name, *options], ranks)


class Watch(lockstep.extend.Monitor):
    """Notes when each update's report came, and the processor times then."""

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self.times: list[float] = []
        self.processor: list[tuple[float, float]] = []

    def see(self, report: Any) -> tuple[()]:
        if self._wait:
            time.sleep(self._wait)
        self.times.append(time.perf_counter())
        if len(self.times) in (FIRST, STEPS):
            self.processor.append((time.thread_time(), time.process_time()))
        return ()

    def seconds(self) -> list[float]:
        """Return the seconds of the updates that count."""
        times = self.times
        return [later - earlier for earlier, later in zip(times[FIRST - 1 :], times[FIRST:], strict=False)]

    def figures(self) -> dict[str, float]:
        seconds = sorted(self.seconds())
        cut = len(seconds) // 20
        (main_before, process_before), (main_after, process_after) = self.processor
        return {
            "median_ms": 1000 * statistics.median(seconds),
            "mean_ms": 1000 * statistics.fmean(seconds[cut : len(seconds) - cut]),
            "main_ms": 1000 * (main_after - main_before) / (STEPS - FIRST),
            "process_ms": 1000 * (process_after - process_before) / (STEPS - FIRST),
        }


class _Silent(lockstep.extend.Tracker):
    """Records nothing: what remains is what Lockstep does for a tracker."""

    def start(self, run: object) -> None:
        return None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        return None


@contextmanager
def _scraped(name: str) -> Iterator[None]:
    """Read the endpoint each second, as Prometheus does, but in this process, which pays for both ends."""
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(1.0):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=1).read()
            except OSError:
                continue

    if name != "on" or os.environ.get("RANK", "0") != "0":
        yield
        return
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def be_contestant(name: str, wait: float) -> dict[str, float]:
    """Return the times of a run's updates."""
    from lockstep.config.loading import load
    from lockstep.config.recipes import resolve_recipe

    watch = Watch(wait)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory(prefix="monitoring-") as folder, _scraped(name):
        overrides = [*run_overrides(wait, ranks, folder), *SWITCHES[name]]
        trackers = [_Silent()] if name == "on" else []
        config = load([resolve_recipe("digits").path], overrides).config
        lockstep.train(config, monitors=[watch], trackers=trackers)
    return watch.figures() if watch.times else {}  # of another rank than the first


def run_overrides(wait: float, ranks: int, folder: str) -> list[str]:
    """Return what makes of the recipe `digits` the run that is measured."""
    return [
        f"model.width={8 if wait else 176}", f"batch.global_size={16 * ranks}", "run.epochs=null",
        f"run.steps={STEPS}", "evaluation.every=null", "evaluation.at_end=false", "launch.device=cpu",
        f"run.folder={folder}/run", "precision.compute=fp32",
        f"parallel.strategy={'single' if ranks == 1 else 'ddp'}",
    ]  # fmt: skip


def table(results: Mapping[str, Any], titles: Mapping[str, str] = FIGURES) -> str:
    """Return the table in Markdown, from what `compared` returned or results/NAME.json holds."""
    rows = [
        [f"{setting}: {name}", *(_text(figures[key], signed=" minus " in name) for key in titles)]
        for setting, of in results["rows"].items()
        for name, figures in of.items()
    ]
    load = f"Load after: {results['load_after']}."
    return f"{markdown(['', *titles.values()], rows)}\n\n{provenance(results)} {load}"


def _text(value: Any, *, signed: bool) -> str:
    spread = value if isinstance(value, Spread) else Spread(**value)
    return spread.text("{:+,.2f}" if signed else "{:,.2f}")


if __name__ == "__main__":
    main()
