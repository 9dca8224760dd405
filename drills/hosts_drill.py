"""Trains on several hosts and cuts one off: `python drills/hosts_drill.py` (as root: hosts are network namespaces).

    hosts, ranks    2 hosts with a rank each, 2 with 2 and 1, 3 with a rank each
    rendezvous      static (each host has its --node-rank), or c10d (in the order of arrival)
    strategy        ddp, fsdp, pipeline

Each run must have the losses of a single process. Then it runs without end, and the link of the last host is set down:
the launchers of all hosts must name a lost host, and the same command must resume the run, with no step missing or
twice, and with the single process's losses.

Prints a table, writes results/hosts_drill.json, and fails (exit code 1) if a row failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attempts import machine
from kit.commands import Running, start_lockstep
from kit.hosts import Network, network

RESULTS = Path(__file__).parent / "results"
RUN = (
    "train", "digits", "launch.device=cpu", "monitor.every=1", "data.train.shift=0", "precision.compute=fp32",
    "optim.name=sgd", "optim.lr=0.01", "schedule.kind=constant", "evaluation.at_end=false", "checkpoint.every=5",
    "run.steps=100000", "recovery.restarts=0",
)  # fmt: skip
PLACES = ((1, 1), (2, 1), (1, 1, 1))
STRATEGIES = ("ddp", "fsdp", "pipeline")
RENDEZVOUS = ("static", "c10d")
COMPARED = 12  # updates
TOKEN = {"LOCKSTEP_JOB_TOKEN": "a token that only the hosts know"}
STARTED: list[Running] = []  # the last launchers
LOST = re.compile(r"host (host-\d) \(ranks? [\d and to]+\) is lost: nothing has come from it for 10 s")


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]  # the last may be half written


def difference(run: Path, alone: list[float]) -> float:
    """Return the largest relative difference from the single process's losses."""
    pairs = list(zip(losses(run), alone, strict=False))
    assert len(pairs) >= COMPARED, f"{len(pairs)} updates"
    return max(abs(own - other) / other for own, other in pairs)


def start(net: Network, folder: Path, ranks: tuple[int, ...], rendezvous: str, words: tuple[str, ...]) -> list[Running]:
    """Start the command on all hosts, the last one first."""
    common = (*RUN, *words, "run.folder=run", "--nodes", len(ranks), "--rendezvous", f"{net.address(0)}:29500")
    launched = {}
    for host in reversed(range(len(ranks))):
        place = ("--node-rank", host) if rendezvous == "static" else ()
        launched[host] = net.start(host, *common, "--ranks", ranks[host], *place, cwd=folder, **TOKEN)
    STARTED[:] = [launched[host] for host in range(len(ranks))]
    return [*STARTED]


def stop(launched: list[Running]) -> None:
    launched[-1].send(signal.SIGINT)
    codes = [launcher.end() for launcher in launched]
    assert set(codes) == {75}, f"{codes}: {launched[0].output}"


def trial(ranks: tuple[int, ...], rendezvous: str, strategy: str, alone: list[float]) -> dict[str, Any]:
    """Train, cut the last host off, resume; return the figures of a row."""
    size = sum(ranks)
    words = (f"parallel.strategy={strategy}",) if strategy != "pipeline" else (f"parallel.pipeline={size}",)
    with tempfile.TemporaryDirectory() as place:
        folder, run = Path(place), Path(place) / "run"
        with network(len(ranks), folder) as net:
            launched = start(net, folder, ranks, rendezvous, words)
            launched[0].wait_for(lambda: len(losses(run)) > COMPARED)
            net.cut(len(ranks) - 1)
            begun, named = time.monotonic(), _named(launched)
            codes = [launcher.end() for launcher in launched]
            ended = round(time.monotonic() - begun, 2)
            assert set(codes) == {1}, f"{codes}: {launched[0].output}"
            net.join(len(ranks) - 1)
            reached = len(losses(run))
            launched = start(net, folder, ranks, rendezvous, words)
            launched[0].wait_for(lambda: len(losses(run)) > reached + 5)
            stop(launched)
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == [*range(1, len(steps) + 1)], "a step is missing, or there twice"
        return {
            "difference": difference(run, alone),
            "updates": min(len(steps), len(alone)),
            "named": named,
            "ended": ended,
        }


def _named(launched: list[Running]) -> list[float]:
    """Return the seconds until each launcher has named a lost host."""
    begun, seconds = time.monotonic(), [0.0] * len(launched)
    while not all(seconds):
        assert time.monotonic() < begun + 60, [launcher.output for launcher in launched]
        for number, launcher in enumerate(launched):
            if not seconds[number] and LOST.search(launcher.output):
                seconds[number] = round(time.monotonic() - begun, 2)
        time.sleep(0.02)
    return seconds


def single_process(updates: int) -> list[float]:
    """Return the losses of one process, stopped after this many updates: the schedule depends on the run's length."""
    with tempfile.TemporaryDirectory() as place:
        launched = start_lockstep(*RUN, "--ranks", 1, "run.folder=run", cwd=Path(place))
        launched.wait_for(lambda: len(losses(Path(place) / "run")) > updates)
        stop([launched])
        return losses(Path(place) / "run")


def table(results: Mapping[str, Any]) -> str:
    lines = [
        "| ranks of each host | rendezvous | strategy | largest difference of losses | updates | "
        "s until each host names the lost one | s until all have ended | resumed |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for row in results["rows"]:
        if "failure" in row:
            figures = f"failed: {row['failure']} | | | | no"
        else:
            named = ", ".join(f"{seconds:.1f}" for seconds in row["named"])
            ended = f"{row['ended']:.1f}" if "ended" in row else ""
            figures = f"{row['difference']:.1e} | {row['updates']:,} | {named} | {ended} | yes"
        lines.append(f"| {' + '.join(map(str, row['ranks']))} | {row['rendezvous']} | {row['strategy']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STRATEGIES, action="append", help="strategies; other rows stay as they are")
    given = parser.parse_args()
    about, alone, rows = machine(), single_process(400), []
    for ranks, rendezvous, strategy in itertools.product(PLACES, RENDEZVOUS, given.only or STRATEGIES):
        row: dict[str, Any] = {"ranks": ranks, "rendezvous": rendezvous, "strategy": strategy}
        try:
            row |= trial(ranks, rendezvous, strategy, alone)
        except AssertionError as failure:
            for launcher in STARTED:
                if launcher.lives:
                    os.killpg(launcher.pid, signal.SIGKILL)
            row["failure"] = str(failure).strip().splitlines()[-1]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    path = RESULTS / "hosts_drill.json"
    kept = json.loads(path.read_text())["rows"] if given.only and path.exists() else []
    both = [*rows, *(row for row in kept if row["strategy"] not in given.only)]
    both.sort(key=lambda row: (PLACES.index(tuple(row["ranks"])), row["rendezvous"] == "c10d", row["strategy"]))
    results = {"command": " ".join(["python", "drills/hosts_drill.py", *sys.argv[1:]]), "machine": about, "rows": both}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    sys.exit(any("failure" in row for row in rows))


if __name__ == "__main__":
    main()
