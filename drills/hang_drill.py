"""Lets ranks hang, and checks who is named, when, and how the run ends: `python drills/hang_drill.py table`.

    table    a fault in one rank --> is it that rank that is named? after how many seconds? is the end bitwise equal?
    long     minutes of training with compilation, evaluations, saves and a loaded host --> nothing may be named

Prints tables, writes results/hang_drill_NAME.json, and fails (exit code 1) if a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from attempts import machine

from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.reading import read_manifest
from lockstep.core.errors import VerificationError
from lockstep.loop.ledger import audit
from lockstep.resilience.faults import FAULTS, Fault, events_of, write_plan
from lockstep.resuming.locations import choose, find

RESULTS = Path(__file__).parent / "results"
STEPS, FAULT_STEP = 30, 22
RUN = (
    "stdlib-lm", "--model.layers=2", "--model.width=64", "--model.heads=2", "--data.train.length=64",
    "--data.evaluation.held-out.length=64", "--data.evaluation.held-out.samples=16", "--evaluation.prompt=null",
    "--evaluation.every=null", f"--run.steps={STEPS}", "--checkpoint.every=10 steps", "--monitor.every=1",
    "--monitor.progress=none", "--monitor.tensorboard=false", "--launch.device=cpu", "--recovery.watchdog.end_after=4",
)  # fmt: skip
COLUMNS = ("strategy", "ranks", "kind", "rank", "phase")
PHASES = ("data", "forward", "backward", "communication", "optimizer", "host")
ROWS = (
    "ddp 2 hang 1 data", "ddp 2 hang 0 forward", "ddp 2 hang 1 backward", "ddp 2 hang 0 communication",
    "ddp 2 hang 1 optimizer", "ddp 2 hang 0 host",
    "ddp 2 stop 0 data", "ddp 2 stop 1 forward", "ddp 2 stop 0 backward", "ddp 2 stop 1 optimizer",
    "ddp 2 gil 1 data", "ddp 2 gil 1 forward", "ddp 2 gil 1 communication", "ddp 2 gil 1 host",
    "ddp 2 collective 0 backward", "ddp 2 collective 1 host",
    "fsdp 2 hang 0 data", "fsdp 2 hang 1 forward", "fsdp 2 hang 0 backward", "fsdp 2 stop 1 backward",
    "fsdp 2 gil 1 forward",
    "ddp 3 hang 2 forward", "ddp 3 stop 1 backward", "ddp 3 gil 1 backward", "fsdp 3 gil 2 forward",
    "single 1 hang 0 forward", "single 1 gil 0 data",
)  # fmt: skip
_NAMED = re.compile(r"^lockstep: (?:ranks? ([\d, and]+) hangs?\b|(the ranks wait in collectives))")
_LONG = (
    "--model.compile=true", "--run.steps=10000000", "--evaluation.every=40 steps", "--checkpoint.every=25 steps",
    "--data.evaluation.held-out.samples=512",
)  # fmt: skip


def trial(row: dict[str, Any]) -> None:
    """Train with a fault, and add what happens to the row. Raises AssertionError."""
    strategy, ranks, kind, rank, phase = (row[name] for name in COLUMNS)
    expected = undisturbed(strategy, int(ranks))
    with tempfile.TemporaryDirectory(prefix="hang-") as name:
        run, plan = Path(name) / "run", Path(name) / "plan.json"
        write_plan(plan, [Fault(kind, int(rank), FAULT_STEP, phase)])
        code, lines = train(run, strategy, int(ranks), {FAULTS: str(plan)})
        text = "\n".join(line for _, line in lines)
        assert code == 0, f"exit code {code}: {text[-2000:]}"
        fired = [event["time"] for event in events_of(plan) if event["event"] == "fired"]
        assert fired, "the fault didn't fire"
        named = [(moment, match) for moment, line in lines if (match := _NAMED.match(line))]
        assert named, f"nothing was named: {text[-2000:]}"
        moment, match = named[0]
        limit = max(2.0, 5 * median_step(run))
        row |= {"named_after": round(moment - fired[0], 2), "limit": round(limit, 2)}
        row["right"] = bool(match[2]) if kind == "collective" else match[1] == rank
        assert row["right"], f"another rank is named: {match[0]}"
        assert row["named_after"] <= row["limit"], f"it is named after {row['named_after']} s"
        check_equal(run, expected)


def train(run: Path, strategy: str, ranks: int, environment: Mapping[str, str]) -> tuple[int, list[tuple[float, str]]]:
    """Return the exit code of a run, and the lines of its stderr with their times."""
    words = [*RUN, f"--ranks={ranks}", f"--parallel.strategy={strategy}", f"--run.folder={run}"]
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words], cwd=run.parent, env={**os.environ, **environment},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        lines = [(time.time(), line.rstrip()) for line in process.stderr]
        return process.wait(), lines


@cache
def undisturbed(strategy: str, ranks: int) -> Path:
    """Return the run in which nothing hangs."""
    run = Path(tempfile.mkdtemp(prefix="undisturbed-")) / "run"
    code, lines = train(run, strategy, ranks, {})
    assert code == 0, lines[-5:]
    assert not any(_NAMED.match(line) for _, line in lines), f"a rank was named in the undisturbed run: {lines}"
    return run


def losses(run: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def median_step(run: Path) -> float:
    """Return the median seconds of an update before the fault."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line["seconds"] for line in lines if line["step"] < FAULT_STEP]
    return statistics.median(later - earlier for earlier, later in pairwise(times[5:]))


def check_equal(run: Path, expected: Path) -> None:
    """Raise AssertionError if the last states, losses or ledgers differ."""
    places = [find(path) for path in (run, expected)]
    first, second = (OpenCheckpoint(place.storage, choose(place, None)) for place in places)
    assert compare(first, second).equal, "the last state differs"
    others = losses(expected)
    assert all(others[step] == loss for step, loss in losses(run).items()), "losses differ"
    manifest = read_manifest(places[0].storage, choose(places[0], None))
    try:
        assert audit(manifest.state, manifest.samples).complete, "the ledger isn't complete"
    except VerificationError as error:
        raise AssertionError(str(error)) from error


# --- a long run ---------------------------------------------------------------------------------------------------


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep processors busy while the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def long_run(seconds: float, strategy: str) -> dict[str, Any]:
    """Train for some seconds, and stop the whole job for 5 s in between, as Ctrl-Z does; return what was named."""
    with tempfile.TemporaryDirectory(prefix="hang-long-") as name, load(2):
        run = Path(name) / "run"
        words = [*RUN, *_LONG, "--ranks=2", f"--parallel.strategy={strategy}", f"--run.folder={run}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "train", *words], cwd=name, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        timers = [
            threading.Timer(0.6 * seconds, os.killpg, (process.pid, signal.SIGSTOP)),
            threading.Timer(0.6 * seconds + 5, os.killpg, (process.pid, signal.SIGCONT)),
            threading.Timer(seconds, os.kill, (process.pid, signal.SIGTERM)),
        ]
        for timer in timers:
            timer.start()
        output, _ = process.communicate()
        assert process.returncode == 75, output[-2000:]
        named = [line for line in output.splitlines() if _NAMED.match(line) or "start again, from" in line]
        found = {"strategy": strategy, "seconds": seconds, "updates": max(losses(run)), "named": named}
        found["evaluations"] = output.count("evaluation held-out")
        found["saves"] = output.count(": saved (")
    return found


# --- tables -------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    if "runs" in results:
        lines = ["| strategy | seconds | updates | evaluations | saves | named |", "|---|--:|--:|--:|--:|---|"]
        for row in results["runs"]:
            cells = [row[name] for name in ("strategy", "seconds", "updates", "evaluations", "saves")]
            lines.append(f"| {' | '.join(map(str, cells))} | {len(row['named']) or 'nothing'} |")
        return "\n".join(lines)
    lines = [
        "| strategy | ranks | fault | rank | in | named after, s | limit, s | named | result |",
        "|---|--:|---|--:|---|--:|--:|---|---|",
    ]
    for row in results["rows"]:
        cells = [row[name] for name in COLUMNS]
        ends = f"failed: {row['failure']}" if "failure" in row else "bitwise equal"
        right = "the collectives of all" if row["kind"] == "collective" else "that rank"
        named = right if row.get("right") else "-"
        times = [row.get("named_after", ""), row.get("limit", "")]
        lines.append(f"| {' | '.join(map(str, [*cells, *times]))} | {named} | {ends} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill", choices=["table", "long"])
    parser.add_argument("--seconds", type=float, default=360.0, help="of each long run")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that contain it")
    arguments = parser.parse_args()
    about = machine()
    name = f"hang_drill_{arguments.drill}"
    results: dict[str, Any] = {"command": f"python drills/hang_drill.py {arguments.drill}", "machine": about}
    if arguments.drill == "long":
        results["runs"] = [long_run(arguments.seconds, strategy) for strategy in ("ddp",)]
        failed = any(row["named"] for row in results["runs"])
    else:
        results["rows"] = rows([row for row in ROWS if arguments.only in row])
        failed = any("failure" in row for row in results["rows"])
    RESULTS.mkdir(exist_ok=True)
    if not arguments.only:
        (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    sys.exit(failed)


def rows(chosen: Sequence[str]) -> list[dict[str, Any]]:
    results = []
    for row in chosen:
        result: dict[str, Any] = dict(zip(COLUMNS, row.split(), strict=True))
        try:
            trial(result)
        except AssertionError as failure:
            result["failure"] = str(failure).strip().splitlines()[0]
            print(failure, file=sys.stderr)
        results.append(result)
        print(result, file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    main()
