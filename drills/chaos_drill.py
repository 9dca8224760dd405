"""Runs `lockstep chaos` under several layouts: `python drills/chaos_drill.py --rounds 30`.

Each round trains a small model with a fault at random. It must recover by itself, and end bitwise as the undisturbed
run. The rows of a layout are written when all its rounds are done; `--only` runs some layouts, and leaves the others.

Prints a table, writes results/chaos_drill.json, and fails (exit code 1) if a round failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from attempts import machine

RESULTS = Path(__file__).parent / "results" / "chaos_drill.json"
RUN = (
    "stdlib-lm", "--model.layers=4", "--model.width=64", "--model.heads=2", "--data.train.length=64",
    "--data.evaluation.held-out.length=64", "--data.evaluation.held-out.samples=16", "--evaluation.prompt=null",
    "--evaluation.every=null", "--batch.global_size=8", "--launch.device=cpu",
)  # fmt: skip
LAYOUTS: Mapping[str, Sequence[str]] = {
    "ddp, 2 ranks": ("--ranks=2", "--parallel.strategy=ddp"),
    "fsdp, 2 ranks": ("--ranks=2", "--parallel.strategy=fsdp"),
    "fsdp, 4 ranks": ("--ranks=4", "--parallel.strategy=fsdp"),
    "zero2, 2 ranks": ("--ranks=2", "--parallel.strategy=deepspeed", "--parallel.deepspeed.zero_stage=2"),
    "zero3, 2 ranks": ("--ranks=2", "--parallel.strategy=deepspeed", "--parallel.deepspeed.zero_stage=3"),
    "pipeline x fsdp, 4 ranks": ("--ranks=4", "--parallel.strategy=fsdp", "--parallel.pipeline=2"),
}


def rows_of(layout: str, rounds: int, seed: int, faults: str | None) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a layout's rounds, and what the command printed."""
    words = [*RUN, *LAYOUTS[layout], f"--rounds={rounds}", f"--seed={seed}", "--json"]
    words += [f"--faults={faults}"] if faults is not None else []
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "chaos", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)
        rows = process.stdout.read()
    return json.loads(rows) if rows else [], "".join(lines[-5:]).strip()


def table(results: Mapping[str, Any]) -> str:
    """Return a row for each fault: rounds that ended equal, of all, and the median of seconds to the next update."""
    layouts = results["layouts"]
    faults = dict.fromkeys(row["fault"] for of_layout in layouts.values() for row in of_layout["rows"])
    lines = [f"| fault | {' | '.join(layouts)} |", f"|---|{'--:|' * len(layouts)}"]
    for fault in sorted(faults):
        cells = [_cell([row for row in of["rows"] if row["fault"] == fault]) for of in layouts.values()]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    totals = [f"**{_equal(of['rows'])}**{of['failure'] and ', then failed'}" for of in layouts.values()]
    every = [row for of in layouts.values() for row in of["rows"]]
    return "\n".join([*lines, f"| **all: {_equal(every)}** | {' | '.join(totals)} |"])


def _equal(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(row['passed'] for row in rows)} of {len(rows)}"


def _cell(rows: Sequence[Mapping[str, Any]]) -> str:
    seconds = [row["recovery_seconds"] for row in rows if row["recovery_seconds"] is not None]
    median = f", {statistics.median(seconds):.1f} s" if seconds else ""
    return f"{_equal(rows)}{median}" if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of each layout; default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=LAYOUTS, action="append", help="layouts; the others stay as they are")
    parser.add_argument("--faults", help="kinds, as of lockstep chaos; default: all that apply")
    parser.add_argument(
        "--add", action="store_true", help="add the rows to those that a layout has; give another --seed"
    )
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text())["layouts"] if RESULTS.exists() else {}
    for layout in given.only or LAYOUTS:
        print(f"\n{layout}", file=sys.stderr, flush=True)
        began = time.monotonic()
        rows, end = rows_of(layout, given.rounds, given.seed, given.faults)
        before = kept.get(layout, {"rows": [], "seconds": 0}) if given.add else {"rows": [], "seconds": 0}
        kept[layout] = {
            "rows": [*before["rows"], *rows],
            "seconds": before["seconds"] + round(time.monotonic() - began),
            "failure": end if not rows else "",
        }
        layouts = {name: kept[name] for name in LAYOUTS if name in kept}
        seed = f" --seed {given.seed}" if given.seed else ""
        results = {"command": f"python drills/chaos_drill.py --rounds {given.rounds}{seed}", "machine": machine()}
        RESULTS.write_text(json.dumps({**results, "layouts": layouts}, indent=1) + "\n")
    print(table({"layouts": layouts}))
    rows = [row for layout in given.only or LAYOUTS for row in kept[layout]["rows"]]
    sys.exit(not rows or not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main()
