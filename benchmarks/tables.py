"""Writes the tables of README.md from results/*.json, so that no number in it is typed by hand.

python benchmarks/tables.py            rewrites the text between <!-- NAME --> and <!-- /NAME -->
python benchmarks/tables.py --check    fails if that would change anything
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bookkeeping
import chat_speed
import gpu_steps
import guards
import invariant
import monitoring
import optimizers
import pipelines
import plan_memory
import plan_search
import plan_time
import plan_time_cpu
import recovery
import relay
import resume
import s3_saving
import saving
import step_overhead
import strategies
import throughput
from rounds import RESULTS, markdown

README = Path(__file__).parent / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = README.read_text()
    after = filled(before)
    if check:
        sys.exit("README.md differs from results/*.json; run python benchmarks/tables.py" if after != before else 0)
    README.write_text(after)


def filled(text: str) -> str:
    """Return the text with each table for which there are results."""
    for name, table in TABLES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            written = table(json.loads(path.read_text()))
            pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
            text = re.sub(pattern, lambda match, written=written: f"{match[1]}{written}\n{match[2]}", text, flags=re.S)
    return text


def startup(results: Mapping[str, Any]) -> str:
    """Return the table of seconds from the command to three moments."""
    rows = results["seconds"]
    columns = list(next(iter(rows.values())))
    lines = [[name, *(_seconds(row[column]) for column in columns)] for name, row in rows.items()]
    blank = [""] * (len(columns) - 1)
    lines += [[name, f"did not run: {why}", *blank] for name, why in results["refused"].items()]
    return f"{markdown(['', *(f's to the {column}' for column in columns)], lines)}\n\n{_provenance(results)}"


def _seconds(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['least']:.2f} to {spread['most']:.2f})"


def hosts(results: Mapping[str, Any]) -> str:
    """Return the table of two hosts: seconds to the first all-reduce, and microseconds of a round trip to the store."""
    columns = ["s to the first all-reduce", "us to the store, rank 0", "us to the store, rank 1"]
    lines = []
    for name, rows in results["all"].items():
        spreads = [(1.0, 2, "first all-reduce"), (1e6, 0, "store, host 0"), (1e6, 0, "store, host 1")]
        cells = [[factor * row[key] for row in rows] for factor, _, key in spreads]
        texts = [
            f"{statistics.median(cell):.{digits}f} ({min(cell):.{digits}f} to {max(cell):.{digits}f})"
            for cell, (_, digits, _) in zip(cells, spreads, strict=True)
        ]
        lines.append([name, *texts])
    facts = f"2 cores, load before: {results['load']:.1f}. Medians, in brackets the least and the most"
    table = markdown(["", *columns], lines)
    return f"{table}\n\n`python benchmarks/hosts.py --rounds {results['rounds']}`: {facts}."


def data(results: Mapping[str, Any]) -> str:
    """Return the table of million tokens per second of one core."""
    gathered = [[f"{row['samples']} x {row['length']}", row["name"], _millions(row)] for row in results["gather"]]
    packed = [
        [f"{row['documents']:,} documents", f"{row['length']:,}", _millions(row), f"{row['padding']:.4%}"]
        for row in results["packing"]
    ]
    batches = markdown(["samples x length", "", "million tokens/s"], gathered)
    packs = markdown(["packed", "into samples of", "million tokens/s", "padding"], packed)
    return f"{batches}\n\n{packs}\n\n{_provenance(results)}"


def _millions(row: Mapping[str, Any]) -> str:
    least, most = row["range"]
    return f"{row['million_tokens_per_second']:,.0f} ({least:,.0f} to {most:,.0f})"


def _provenance(results: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    return f"`{results['command']}`: {facts}. Medians over interleaved rounds, in brackets the least and the most."


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "step_overhead": step_overhead.table,
    "throughput": throughput.table,
    "chat_speed": chat_speed.table,
    "strategies": strategies.table,
    "pipelines": pipelines.table,
    "startup": startup,
    "hosts": hosts,
    "relay": relay.table,
    "data": data,
    "saving": saving.table,
    "s3_saving": s3_saving.table,
    "resume": resume.table,
    "recovery": recovery.table,
    "goodput": recovery.goodput_table,
    "invariant": invariant.table,
    "optimizers": optimizers.table,
    "bookkeeping": bookkeeping.table,
    "monitoring": monitoring.table,
    "guards": guards.table,
    "plan_memory": plan_memory.table,
    "plan_memory_gpu": plan_memory.table,
    "plan_search": plan_search.table,
    "plan_time": plan_time.table,
    "plan_time_cpu": plan_time_cpu.table,
    "gpu_steps": gpu_steps.table,
}


if __name__ == "__main__":
    main()
