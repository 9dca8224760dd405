"""Sends stop signals to runs that are starting, and checks how they end: `python drills/signal_drill.py`.

    command starts ---- 5 ms ---- 5 ms ---- 5 ms ---- ... ---- first update ---- ...
                          a signal at one of these moments, to the launcher or to its process group

Each trial starts a run and sends one signal. The run must end by itself, with all of its processes, with one sentence
and exit code 75 (130 after SIGINT and SIGHUP, unless there was an update to save), without a traceback. Signals that
arrive before Python runs the first line of Lockstep are counted separately.

Prints a table, writes results/signal_drill.json, and fails (exit code 1) if a trial failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from attempts import machine, processes_of_group

from lockstep.core.stopping import stop_code

RESULTS = Path(__file__).parent / "results"
PATIENCE = 60.0  # seconds after the signal; a run that takes longer hangs
SIGNALS = ("SIGTERM", "SIGINT")
TARGETS = ("launcher", "group")
RUN = (
    "stdlib-lm", "--model.layers=2", "--model.width=64", "--model.heads=2", "--data.train.length=64",
    "--data.evaluation.held-out.length=64", "--data.evaluation.held-out.samples=16", "--evaluation.prompt=null",
    "--evaluation.every=null", "--run.steps=1000000", "--monitor.progress=none", "--monitor.tensorboard=false",
    "--launch.device=cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A start with one signal.

    Attributes:
        after: Seconds from the start of the command to the signal.
    """

    name: str
    ranks: int
    target: str
    after: float


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        kind: `stopped`, `saved`, `before Lockstep`, or `failed`.
        seconds: Time from the signal to the end of the command.
        why: Why it failed.
    """

    trial: Trial
    kind: str
    code: int
    seconds: float
    why: str = ""


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it, and so
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # would the runs, as they should
    arguments = _arguments()
    first = _seconds_to_first_update(max(arguments.ranks), arguments.where)
    trials = list(schedule(arguments, first))
    _print(f"the first update comes after {first:.2f} s; {len(trials)} trials")
    began = time.perf_counter()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        outcomes = []
        for number, outcome in enumerate(pool.map(lambda trial: attempt(trial, arguments.where), trials), 1):
            outcomes.append(outcome)
            if outcome.kind == "failed" or number % 50 == 0:
                _print(f"{number}: {outcome.trial} {outcome.kind} {outcome.code} {outcome.why}")
    results = {"command": _command(arguments), "machine": machine(), **summary(outcomes, first)}
    results["seconds"] = round(time.perf_counter() - began, 1)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "signal_drill.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(results), flush=True)
    sys.exit(1 if results["failed"] else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=5.0, help="milliseconds between two moments")
    parser.add_argument("--times", type=int, default=100, help="moments, drawn evenly from the start, of each row")
    parser.add_argument("--until", type=float, default=1.1, help="the last moment, in times to the first update")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2])
    parser.add_argument("--signals", type=lambda text: text.split(","), default=list(SIGNALS))
    parser.add_argument("--at-once", type=int, default=1, help="starts side by side")
    parser.add_argument("--where", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _command(arguments: argparse.Namespace) -> str:
    words = [f"--times {arguments.times}", f"--every {arguments.every:g}", f"--until {arguments.until:g}"]
    words.append(f"--ranks {','.join(map(str, arguments.ranks))}")
    return f"python drills/signal_drill.py {' '.join(words)} --signals {','.join(arguments.signals)}"


def schedule(arguments: argparse.Namespace, first: float) -> Iterator[Trial]:
    """Yield trials at multiples of `every`, from the start to `until`.

    Rows take turns, so that together they come close to every moment.
    """
    moments = int(arguments.until * first * 1000 / arguments.every)
    rows = list(itertools.product(arguments.signals, arguments.ranks, TARGETS))
    for number in range(arguments.times * len(rows)):
        name, ranks, target = rows[number % len(rows)]
        moment = round(number * moments / (arguments.times * len(rows)))
        yield Trial(name, ranks, target, moment * arguments.every / 1000)


def _started(ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    program = str(Path(sys.executable).with_name("lockstep"))
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [program, "train", *RUN, f"--ranks={ranks}", f"--run.folder={folder / 'run'}"],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True,
        )  # fmt: skip


def _seconds_to_first_update(ranks: int, where: Path | None) -> float:
    def once() -> float:
        with tempfile.TemporaryDirectory(dir=where, prefix="drill-signals-") as folder:
            began = time.monotonic()
            process = _started(ranks, Path(folder))
            metrics = Path(folder, "run", "metrics.jsonl")
            while not (metrics.exists() and metrics.stat().st_size):
                assert process.poll() is None, Path(folder, "output").read_text()
                time.sleep(0.002)
            seconds = time.monotonic() - began
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return seconds

    return statistics.median(once() for _ in range(3))


def attempt(trial: Trial, where: Path | None) -> Outcome:
    with tempfile.TemporaryDirectory(dir=where, prefix="drill-signals-") as name:
        folder, began = Path(name), time.monotonic()
        process = _started(trial.ranks, folder)
        time.sleep(max(0.0, began + trial.after - time.monotonic()))
        sent, number = time.monotonic(), signal.Signals[trial.name]
        (os.kill if trial.target == "launcher" else os.killpg)(process.pid, number)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            return Outcome(trial, "failed", code, PATIENCE, f"hangs: {_output(folder)}")
        seconds = time.monotonic() - sent
        kind, why = outcome_of(trial, code, _output(folder))
        if left := list(processes_of_group(process.pid)):
            time.sleep(1.0)  # the kernel is ending them
            if left := list(processes_of_group(process.pid)):
                kind, why = "failed", f"leaves processes {left}"
                os.killpg(process.pid, signal.SIGKILL)
        if kind == "stopped" and (folder / "run").exists() and not (folder / "run" / "config.yaml").exists():
            kind, why = "failed", f"leaves a run folder without a run: {os.listdir(folder / 'run')}"
        return Outcome(trial, kind, code, seconds, why)


def _output(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")


def outcome_of(trial: Trial, code: int, output: str) -> tuple[str, str]:
    """Return the kind of the outcome, and what is wrong with it."""
    number = signal.Signals[trial.name]
    if "lockstep" not in output and (code == -number or (number == signal.SIGINT and code in (1, -number))):
        return "before Lockstep", ""
    if "Traceback" in output or "Exception ignored" in output:
        return "failed", f"shows a traceback: {output[-2000:]}"
    if code == 75 and "and saved" in output:
        return "saved", ""
    sentences = re.findall(rf"^lockstep: stopped by {trial.name}$", output, re.MULTILINE)
    if code != stop_code(number):
        return "failed", f"exit code {code}: {output[-2000:]}"
    if len(sentences) != 1:
        return "failed", f"{len(sentences)} sentences: {output[-2000:]}"
    return "stopped", ""


def summary(outcomes: Sequence[Outcome], first: float) -> dict[str, Any]:
    rows = []
    for key in dict.fromkeys((o.trial.name, o.trial.ranks, o.trial.target) for o in outcomes):
        mine = [o for o in outcomes if (o.trial.name, o.trial.ranks, o.trial.target) == key]
        kinds = Counter(o.kind for o in mine)
        early = [o.trial.after for o in mine if o.kind == "before Lockstep"]
        rows.append(
            {
                "signal": key[0], "ranks": key[1], "target": key[2], "trials": len(mine),
                **{kind: kinds[kind] for kind in ("stopped", "saved", "before Lockstep", "failed")},
                "longest": round(max(o.seconds for o in mine), 2),
                "before_until": max(early, default=0.0),
            }
        )  # fmt: skip
    failed = [asdict(o) for o in outcomes if o.kind == "failed"]
    return {"first_update": round(first, 2), "rows": rows, "failed": failed}


def table(results: Mapping[str, Any]) -> str:
    lines = [
        "| signal | ranks | sent to | trials | stopped | saved | before Lockstep ran | failed | longest, s |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['signal']} | {row['ranks']} | {row['target']} | {row['trials']} | {row['stopped']} | "
            f"{row['saved']} | {row['before Lockstep']} | {row['failed']} | {row['longest']:.2f} |"
        )
    early = max(row["before_until"] for row in results["rows"])
    lines.append("")
    lines.append(
        f"The first update came after {results['first_update']:.2f} s. Python itself answered signals up to "
        f"{1000 * early:.0f} ms after the command, before it ran the first line of Lockstep."
    )
    return "\n".join(lines)


def _print(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
