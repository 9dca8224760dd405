"""Measures what all guards of a run cost together, beside an update of about 50 ms: `python benchmarks/guards.py`.

    off        no restarts, no watch over ranks, no snapshots in memory, no limits for the loss and the gradient norm
    default    a config without the sections `recovery` and `data.bad_samples`
    all        more: copies of the state are compared every 100 updates, spikes are discarded, bad samples are left out

The runs, the settings and the figures are those of `monitoring.py`; meters, TensorBoard and progress are off.
Lockstep's launcher starts the ranks. It has the watch and keeps the snapshots; its processor time is measured, too. The
mean is over all updates: a comparison is in few of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import monitoring
from monitoring import FIRST, SETTINGS, STEPS, WAIT_S
from rounds import in_processes, report

import lockstep

SWITCHES = {
    "off": [
        "recovery.restarts=0",
        "recovery.watchdog.enabled=false",
        "recovery.snapshot_every=null",
        "recovery.bad_numbers.spike=ignore",
    ],
    "default": [],
    "all": [
        "recovery.compare_every=100",
        "recovery.bad_numbers.spike=skip",
        "data.bad_samples={policy: skip, limit: 10}",
    ],
}
FIGURES = {
    "median_ms": "median of an update, ms",
    "mean_ms": "mean of an update, ms",
    "main_ms": "processor time of the training thread, ms",
    "process_ms": "processor time of rank 0, ms",
    "launcher_ms": "processor time of the launcher, ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    parser.add_argument("--ranks", type=int, default=1, help="of the contestant")
    parser.add_argument("--wait", action="store_true", help="the contestant's updates wait")
    parser.add_argument("--only", choices=list(SETTINGS), help="measure in this setting alone")
    arguments = parser.parse_args()
    if arguments.contestant:
        wait = WAIT_S if arguments.wait else 0.0
        report(be_contestant(arguments.contestant, wait, arguments.ranks))
        return
    print(table(monitoring.compared("guards", SWITCHES, _measured, arguments.rounds, arguments.only)))


def _measured(name: str, ranks: int, options: list[str]) -> Mapping[str, float]:
    return in_processes(__file__, ["--contestant", name, "--ranks", str(ranks), *options], 1)


class _GuardedRank(monitoring.Watch):
    """Writes the figures into a file at the last update, because a rank is another process than the contestant."""

    def __init__(self, wait: float, launcher: int, file: Path) -> None:
        super().__init__(wait)
        self._launcher, self._file = launcher, file
        self._of_launcher: list[float] = []

    def see(self, report: Any) -> tuple[()]:
        super().see(report)
        if len(self.times) in (FIRST, STEPS):
            self._of_launcher.append(_processor_seconds(self._launcher) if self._launcher != os.getpid() else 0.0)
        if len(self.times) == STEPS:
            before, after = self._of_launcher
            figures = self.figures() | {
                "mean_ms": 1000 * statistics.fmean(self.seconds()),
                "launcher_ms": 1000 * (after - before) / (STEPS - FIRST),
            }
            self._file.write_text(json.dumps(figures))
        return ()


def _processor_seconds(process: int) -> float:
    """Return the processor time of all threads of a process."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def be_contestant(name: str, wait: float, ranks: int) -> dict[str, float]:
    """Return the times of a run's updates."""
    from lockstep.config.loading import load
    from lockstep.config.recipes import resolve_recipe

    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        overrides = [*monitoring.run_overrides(wait, ranks, folder), *monitoring.SWITCHES["off"], *SWITCHES[name]]
        config = load([resolve_recipe("digits").path], overrides).config
        figures = Path(folder) / "figures.json"
        lockstep.train(config, ranks=ranks, monitors=[_GuardedRank(wait, os.getpid(), figures)])
        measured: dict[str, float] = json.loads(figures.read_text())
        return measured


table = functools.partial(monitoring.table, titles=FIGURES)


if __name__ == "__main__":
    main()
