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
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attempts import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = Path(__file__).parent / "results" / "simulated_cells.json"
PAGE = ROOT / "docs" / "simulated-cells.md"
FAMILIES = {
    "single, dp and ddp": lambda name: name in ("single", "dp", "ddp"),
    "fsdp": lambda name: name.startswith("fsdp"),
    "deepspeed": lambda name: name.startswith("zero"),
    "pipeline": lambda name: name.startswith("pipeline") and "+" not in name,
    "tensor and context": lambda name: name.startswith(("tensor", "context")) and "+" not in name,
    "products": lambda name: "+" in name,
}
"""Tables of the page, and which layouts are columns of each."""
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
    """Return the page with the tables of the results."""
    written = tables(results)
    return re.sub(
        r"(<!-- cells -->\n).*?(<!-- /cells -->)", lambda at: f"{at[1]}{written}\n{at[2]}", text, flags=re.DOTALL
    )


def tables(results: Results) -> str:
    """Return a table for each family of layouts, and the reasons that they refer to by number."""
    reasons: dict[str, int] = {}
    layouts = list(dict.fromkeys(name.split("/")[0] for name in results))
    outcomes = [result["outcome"] for result in results.values()]
    runs = outcomes.count("runs")
    refused = sum(outcome.startswith("refused") for outcome in outcomes)
    parts = [f"{len(results)} cells: {runs} run, {refused} are refused, {len(results) - runs - refused} fail in torch."]
    for family, has in FAMILIES.items():
        parts += [f"### {family}", _table(results, [layout for layout in layouts if has(layout)], reasons)]
    listed = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n\n".join([*parts, "### Why not", "\n".join(listed)])


def _table(results: Results, layouts: list[str], reasons: dict[str, int]) -> str:
    by_cell: dict[tuple[str, str], dict[str, Any]] = {}
    for name, result in results.items():
        layout, feature, precision = name.split("/")
        if layout in layouts:
            by_cell.setdefault((feature, layout), {})[precision] = result
    features = list(dict.fromkeys(feature for feature, _ in by_cell))
    lines = [f"| | {' | '.join(layouts)} |", f"| --- |{' --- |' * len(layouts)}"]
    for feature in features:
        marks = [_mark(by_cell.get((feature, layout), {}), reasons) for layout in layouts]
        lines.append(f"| {feature or '(nothing else)'} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _mark(by_precision: Mapping[str, Mapping[str, Any]], reasons: dict[str, int]) -> str:
    """Return a cell's text: one for all precisions, or one for each."""
    marks: dict[str, str] = {}
    for precision, result in by_precision.items():
        outcome = " ".join(result["outcome"].split())
        if outcome == "runs":
            marks[precision] = "runs, waits" if result["waits"] else "runs"
        else:
            number = reasons.setdefault(_reason(outcome), len(reasons) + 1)
            marks[precision] = f"{'refused' if outcome.startswith('refused') else 'fails'} ({number})"
    if len(set(marks.values())) == 1:
        return next(iter(marks.values()))
    return "<br>".join(f"{precision}: {mark}" for precision, mark in marks.items()) or "-"


def _reason(outcome: str) -> str:
    text = outcome.removeprefix("refused: ").partition(" at ")[0] if not outcome.startswith("refused") else outcome[9:]
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    main()
