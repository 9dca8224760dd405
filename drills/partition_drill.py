"""Kills and cuts off hosts of runs that train, and lets them come back: `python drills/partition_drill.py` (as root).

Hosts are network namespaces, with a rank each. Each run must go through to its end by itself, with a complete ledger,
and bitwise the state and losses of the same run on one host, in which nothing fails. While a host is cut off, its ranks
must have ended before the others train. In the rows with snapshots no checkpoint is saved before the end: the run must
resume from memory.

Prints a table, writes results/partition_drill.json, and fails (exit code 1) if a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attempts import machine
from kit.commands import Running, run_lockstep
from kit.hosts import Network, network

from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.reading import read_manifest
from lockstep.loop.ledger import audit
from lockstep.resilience.faults import events_of, write_plan
from lockstep.resuming.locations import choose, find

RESULTS = Path(__file__).parent / "results"
SLOW = f"{Path(__file__).parents[1] / 'tests' / 'launch' / 'slow_images.py'}:SlowImages"
STEPS = 150
RUN = (
    "train", "digits", f"run.steps={STEPS}", "launch.device=cpu", "monitor.every=1", "precision.compute=fp32",
    "evaluation.at_end=false", "checkpoint.every=20", "launch.timeout=60", "data.train.kind=custom",
    f"data.train.target={SLOW}", "model.classes=10", "batch.micro_size=16",
    "--ranks", 1,
)  # fmt: skip
TOKEN = {"LOCKSTEP_JOB_TOKEN": "a token that only the hosts know"}
EVERY = 5
RARE = ("checkpoint.every=100000", f"recovery.snapshot_every={EVERY}")
BEGINS = 30  # the update after which a row disturbs
CUT_S = 12.0  # longer than the silence after which a host counts as lost, and its ranks' end


@dataclass
class Cluster:
    net: Network
    folder: Path
    nodes: str
    hosts: int
    strategy: str
    has_snapshots: bool = False

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, host: int) -> Running:
        words = (*RUN, f"run.folder={self.run}", *_of(self.strategy), *(RARE if self.has_snapshots else ()))
        meet = ("--nodes", self.nodes, "--rendezvous", f"{self.net.address(0)}:29500", "--node-rank", host)
        environment = {**TOKEN, "LOCKSTEP_FAULTS": str(self.folder / "plan.json")}
        place = self.folder / f"start-{time.monotonic_ns()}"
        place.mkdir()
        return self.net.start(host, *words, *meet, cwd=place, **environment)

    def updates(self) -> list[float]:
        """Return when the first update of each round was made."""
        return [event["time"] for event in events_of(self.folder / "plan.json") if event["event"] == "updated"]


def _of(strategy: str) -> tuple[str, ...]:
    """Return the words that choose a strategy; only ddp is the same on any number of ranks."""
    return f"parallel.strategy={strategy}", f"run.determinism={'default' if strategy == 'fsdp' else 'invariant'}"


Launchers = dict[int, Running]
Act = Callable[[Cluster, Launchers], float]  # returns when all is mended; 0: nothing breaks


def _kill_rank(host: int) -> Act:
    def act(cluster: Cluster, launched: Launchers) -> float:
        os.kill(_ranks(launched[host])[-1], signal.SIGKILL)
        return time.time()

    return act


def _kill_host(host: int, away: float) -> Act:
    """Kill a launcher, and start it again after some seconds."""

    def act(cluster: Cluster, launched: Launchers) -> float:
        launched[host].send(signal.SIGKILL)
        assert launched[host].end() == -signal.SIGKILL
        time.sleep(away)
        launched[host] = cluster.start(host)
        return time.time()

    return act


def _cut(host: int, seconds: float) -> Act:
    """Set a host's link down for a while."""

    def act(cluster: Cluster, launched: Launchers) -> float:
        cluster.net.cut(host)
        _check_halves(cluster, launched, host, seconds)
        cluster.net.join(host)
        return time.time()

    return act


def _drop_one_way(host: int, seconds: float) -> Act:
    """Lose all that a host sends to host 0, which it still receives from."""

    def act(cluster: Cluster, launched: Launchers) -> float:
        cluster.net.lose(host)
        _check_halves(cluster, launched, host, seconds)
        cluster.net.find(host)
        return time.time()

    return act


def _cut_briefly(host: int) -> Act:
    """Set a host's link down for less than the silence after which it counts as lost."""

    def act(cluster: Cluster, launched: Launchers) -> float:
        cluster.net.cut(host)
        time.sleep(2.0)
        cluster.net.join(host)
        return 0.0

    return act


def _slow(host: int) -> Act:
    def act(cluster: Cluster, launched: Launchers) -> float:
        cluster.net.slow(host)
        return 0.0

    return act


def _check_halves(cluster: Cluster, launched: Launchers, host: int, seconds: float) -> None:
    """Wait, and check that no two halves of the network train: at the end a half without host 0 has no ranks."""
    time.sleep(seconds)
    apart = [host] if host else [other for other in launched if other]
    for other in apart:
        ranks = _ranks(launched[other])
        assert not ranks, f"host {other} still has ranks {ranks} after {seconds} s without host 0"


def _ranks(launcher: Running) -> list[int]:
    """Return the ranks' processes; the relay is no rank."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in launcher.ranks}
    return [pid for pid, name in names.items() if b"proxy" not in name]


# what happens: --nodes, hosts, what is done
ROWS: dict[str, tuple[str, int, Act]] = {
    "a rank of host 1 is killed": ("2", 2, _kill_rank(1)),
    "a rank of host 0 is killed": ("2", 2, _kill_rank(0)),
    "host 1 is killed, and started again after 2 s": ("2", 2, _kill_host(1, 2.0)),
    "host 0 is killed, and started again after 2 s": ("2", 2, _kill_host(0, 2.0)),
    "host 1 is cut off for 12 s": ("2", 2, _cut(1, CUT_S)),
    "host 0 is cut off for 12 s": ("2", 2, _cut(0, CUT_S)),
    "host 1 of three is cut off for 12 s": ("3", 3, _cut(1, CUT_S)),
    "host 0 of three is cut off for 12 s": ("3", 3, _cut(0, CUT_S)),
    "host 1 is cut off for 2 s": ("2", 2, _cut_briefly(1)),
    "what host 1 sends is lost for 12 s": ("2", 2, _drop_one_way(1, CUT_S)),
    "host 1 sends at 20 Mbit/s": ("2", 2, _slow(1)),
    "1:2 hosts, host 1 is cut off for 14 s": ("1:2", 2, _cut(1, 14.0)),
    "1:2 hosts, host 1 is killed, and started again after 2 s": ("1:2", 2, _kill_host(1, 2.0)),
}
SNAPSHOTS = {
    "snapshots: a rank of host 1 is killed": ("2", 2, _kill_rank(1)),
    "snapshots: a rank of host 0 is killed": ("2", 2, _kill_rank(0)),
    "snapshots: host 1 is cut off for 12 s": ("2", 2, _cut(1, CUT_S)),
}  # in which no checkpoint is saved before the end: under fsdp, where no rank that is left has the whole state
ROWS |= SNAPSHOTS
STRATEGIES = ("ddp", "fsdp")  # under run.determinism: invariant, which fewer ranks need


def trial(what: str, strategy: str) -> dict[str, Any]:
    """Train, disturb, and return the figures of a row."""
    nodes, hosts, act = ROWS[what]
    with tempfile.TemporaryDirectory() as place:
        cluster_folder = Path(place)
        write_plan(cluster_folder / "plan.json", [])
        with network(hosts, cluster_folder) as net:
            cluster = Cluster(net, cluster_folder, nodes, hosts, strategy, what in SNAPSHOTS)
            launched = {host: cluster.start(host) for host in range(hosts)}
            try:
                launched[0].wait_for(partial(_has_trained, cluster.run, BEGINS))
                begun = time.time()
                mended = act(cluster, launched)
                codes = {host: launcher.end() for host, launcher in launched.items()}
                output = "".join(launcher.output for launcher in launched.values())
                assert set(codes.values()) == {0}, f"{codes}: {output}"
            finally:
                for launcher in launched.values():
                    if launcher.lives:
                        os.killpg(launcher.pid, signal.SIGKILL)
        if what in SNAPSHOTS:
            _check_resumed(cluster.run)
        _check_equal(cluster.run, undisturbed(strategy, 1 if ":" in nodes else hosts))
        rounds = cluster.updates()
        after = [moment for moment in rounds if moment > begun]
        assert (len(after) > 0) == (mended > 0), f"{len(rounds)} rounds"
        again = after[-1] - mended if mended else None
        return {"rounds": len(rounds), "recovered": None if again is None else round(again, 2)}


def _check_resumed(run: Path) -> None:
    """Check that the run has resumed from memory (no checkpoint was saved), after few of its updates."""
    log = (run / "logs" / "rank-0.log").read_text()
    steps = [int(step) for step in re.findall(r"resumes from step (\d+) ", log)]
    assert steps, "it has not resumed from memory"
    assert steps[0] >= BEGINS - EVERY, f"it has resumed from step {steps[0]}"


def _has_trained(run: Path, step: int) -> bool:
    return max(_losses(run), default=0) >= step


def _losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows}


def _check_equal(run: Path, expected: Path) -> None:
    places = [find(path) for path in (run, expected)]
    first, second = (OpenCheckpoint(place.storage, choose(place, None)) for place in places)
    seen = compare(first, second)
    assert seen.same, "no tensor was compared"
    assert not any((*seen.alone, seen.kinds, seen.values, seen.state)), f"the state differs: {seen.values}"
    losses, others = _losses(run), _losses(expected)
    assert all(others[step] == loss for step, loss in losses.items()), "losses differ"
    place = find(run)
    manifest = read_manifest(place.storage, choose(place, None))
    assert manifest.step == STEPS, f"it ends at step {manifest.step}"
    assert audit(manifest.state, manifest.samples).complete, "the ledger isn't complete"


@cache
def undisturbed(strategy: str, ranks: int) -> Path:
    """Return the run on one host in which nothing fails."""
    run = Path(tempfile.mkdtemp(prefix="undisturbed-")) / "run"
    strategy = strategy if ranks > 1 else "single"
    done = run_lockstep(*RUN, "--ranks", ranks, f"run.folder={run}", *_of(strategy), cwd=run.parent)
    assert done.returncode == 0, done.stderr
    return run


def table(results: Mapping[str, Any]) -> str:
    lines = [
        "| what happens | strategy | rounds | s from its end to the next update | result |",
        "|---|---|--:|--:|---|",
    ]
    for row in results["rows"]:
        if "failure" in row:
            lines.append(f"| {row['what']} | {row['strategy']} | | | failed: {row['failure']} |")
        else:
            recovered = "" if row["recovered"] is None else f"{row['recovered']:.1f}"
            lines.append(f"| {row['what']} | {row['strategy']} | {row['rounds']} | {recovered} | bitwise equal |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=int, nargs="+", default=list(range(1, len(ROWS) + 1)), metavar="NUMBER", help="other rows stay"
    )
    parser.add_argument("--strategy", choices=STRATEGIES, action="append")
    given = parser.parse_args()
    about, rows = machine(), []
    for number in given.only:
        what = list(ROWS)[number - 1]
        for strategy in given.strategy or (("fsdp",) if what in SNAPSHOTS else ("ddp",)):
            row: dict[str, Any] = {"what": what, "strategy": strategy}
            try:
                row |= trial(what, strategy)
            except AssertionError as failure:
                print(failure, file=sys.stderr)
                row["failure"] = str(failure).strip().splitlines()[-1]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    path = RESULTS / "partition_drill.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["what"], row["strategy"]) for row in rows}
    rows += [row for row in kept if (row["what"], row["strategy"]) not in done and row["what"] in ROWS]
    rows.sort(key=lambda row: (STRATEGIES.index(row["strategy"]), list(ROWS).index(row["what"])))
    results = {"command": "python drills/partition_drill.py", "machine": about, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    sys.exit(any("failure" in row for row in rows))


if __name__ == "__main__":
    main()
