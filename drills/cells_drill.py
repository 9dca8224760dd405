"""Run each strategy with each feature and option on the simulated accelerator: `python drills/cells_drill.py`.

    --only TEXT    cells whose name, such as `fsdp/offload/bf16`, contains the text; the others keep their results
    --missing      cells without a result
    --tables       no cell: the page alone, from the results

Writes results/simulated_cells.json and docs/simulated-cells.md; fails (exit code 1) if a cell is at fault: a rank fails
or waits for the accelerator where tests/simulation/host_syncs.toml doesn't list it, or a refusal isn't a known one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells_page
from attempts import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = Path(__file__).parent / "results" / "simulated_cells.json"
PAGE = ROOT / "docs" / "simulated-cells.md"
_CHUNK = 24  # cells that a process runs: the longer it lives, the more caches of torch it fills
ALL_WAIT = "readback.py:land"  # the wait of all runs, for numbers that have been ready for long
Results = dict[str, dict[str, Any]]


def main() -> None:
    from kit.cells import Cell, cells

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    results: Results = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}
    every = {name_of(row): row for rows in cells(every=True).values() for row in rows}
    results = {name: results[name] for name in every if name in results}

    def asked(row: Cell) -> bool:
        name = name_of(row)
        return not arguments.tables and arguments.only in name and not (arguments.missing and name in results)

    for ranks, rows in cells(every=True).items():
        for chunk in _chunks([row for row in rows if asked(row)]):
            began = time.monotonic()
            results.update(run(chunk, ranks))
            print(f"{name_of(chunk[0])}: {len(chunk)} cells, {time.monotonic() - began:.0f} s", flush=True)
            save({name: results[name] for name in every if name in results})
    at_fault = [f"{name}: {fault}" for name, result in results.items() for fault in result["faults"]]
    PAGE.write_text(filled(PAGE.read_text(), results))
    print("\n".join(at_fault) or f"{len(results)} cells, none at fault")
    sys.exit(bool(at_fault))


def name_of(row: tuple[str, str, str]) -> str:
    return "/".join(row)


def _chunks(rows: list[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(rows), _CHUNK):
        yield rows[first : first + _CHUNK]


def run(rows: list[tuple[str, str, str]], ranks: int) -> Results:
    """Return the result of each cell: its outcome, its waits beyond those of all runs, what is wrong with it."""
    from kit.cells import config, fault
    from kit.simulated import simulated

    try:
        runs = simulated([config(*row) for row in rows], ranks)
    except AssertionError as died:
        if len(rows) > 1:  # each by itself, so that the one is named
            return {name: result for row in rows for name, result in run([row], ranks).items()}
        return {name_of(rows[0]): {"outcome": str(died), "waits": [], "faults": [str(died)]}}
    results: Results = {}
    for row, by_rank in zip(rows, runs, strict=True):
        outcomes = [each.outcome for each in by_rank]
        waits = {wait for each in by_rank for wait in each.syncs if ALL_WAIT not in wait}
        faults = [text for rank, each in enumerate(by_rank) if (text := fault(row, rank, each)) is not None]
        worst = next((outcome for outcome in outcomes if outcome != "runs"), "runs")
        results[name_of(row)] = {"outcome": worst, "waits": sorted(waits), "faults": faults}
    return results


def save(results: Results) -> None:
    written = {"command": "python drills/cells_drill.py", "machine": machine(), "cells": results}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n")


# --- the page -----------------------------------------------------------------------------------------------------


def filled(text: str, results: Results) -> str:
    """Return the page with what the results and the listed waits and failures state."""
    from kit.cells import KNOWN, SYNCS

    waits = {row["where"]: row["why"] for row in SYNCS}
    return cells_page.filled(text, results, waits, {row["outcome"]: row["why"] for row in KNOWN if "why" in row})


if __name__ == "__main__":
    main()
