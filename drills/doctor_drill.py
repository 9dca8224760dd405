"""Plants faults for real, runs the doctor, and checks that it names each: `python drills/doctor_drill.py`.

    a port taken, a full /dev/shm, a wrong torchvision, ...     lockstep doctor
    a slow link, a clock, an interface, a host that is missing  lockstep doctor --ranks on hosts, which are namespaces

Prints a table, writes results/doctor_drill.json, and fails (exit code 1) if a fault wasn't named. Faults that this
machine can't have (no root, no compiler) are listed as such.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attempts import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.planted import FAULTS, PlantedFault

RESULTS = Path(__file__).parent / "results"
_LONGEST = 230  # characters of what the doctor printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the names of the faults to plant; nothing is written then")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if args.only is None or args.only in fault.name]
    rows = [row_of(fault) for fault in chosen]
    results = {"command": "python drills/doctor_drill.py", "machine": machine(), "faults": rows}
    print(table(results))
    if args.only is None:
        (RESULTS / "doctor_drill.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row["missed"] for row in rows))


def row_of(fault: PlantedFault) -> dict[str, Any]:
    """Plant a fault and return what the doctor printed about it."""
    why = fault.why_not()
    row: dict[str, Any] = {"name": fault.name, "planted": fault.planted, "missed": False}
    if why is not None:
        return {**row, "command": "", "printed": f"not planted: {why}", "code": None}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = fault.plant(Path(folder))
        text = answer.text.replace(folder, ".").replace(sysconfig.get_path("purelib"), "site-packages")
        text = text.replace(str(Path(torch.__file__).parents[1]), "site-packages")
    seconds = round(time.monotonic() - began, 1)
    line = next((line.strip() for line in text.splitlines() if re.search(fault.names, line)), "")
    is_named = bool(line) and answer.code == fault.code
    printed = line.removeprefix("lockstep: ") if line else f"MISSED: {text[-2000:]}"
    printed = printed if len(printed) <= _LONGEST or not is_named else f"{printed[: _LONGEST - 1]}…"
    return {
        **row, "command": answer.command.replace(folder, "."), "printed": printed, "code": answer.code,
        "missed": not is_named, "seconds": seconds,
    }  # fmt: skip


def table(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["| fault | planted | command | the doctor prints | exit code |", "|---|---|---|---|--:|"]
    for row in results["faults"]:
        command = f"`{_cell(row['command'])}`" if row["command"] else ""
        code = "" if row["code"] is None else row["code"]
        lines.append(f"| {row['name']} | {_cell(row['planted'])} | {command} | {_cell(row['printed'])} | {code} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
