"""Writes the tables of README.md from results/*.json: `python drills/tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attack_drill
import aws_drill
import chaos_drill
import doctor_drill
import elastic_drill
import hang_drill
import hosts_drill
import kill_drill
import partition_drill
import peers_drill
import s3_drill
import signal_drill
import versions_drill

HERE = Path(__file__).parent
TABLES = {
    "kill_drill_runs": lambda results: _as_code(kill_drill.runs_table(results)),
    "kill_drill_saves": lambda results: _as_code(kill_drill.saves_table(results)),
    "signal_drill": signal_drill.table,
    "elastic_drill": elastic_drill.table,
    "hosts_drill": hosts_drill.table,
    "partition_drill": partition_drill.table,
    "hang_drill_table": hang_drill.table,
    "hang_drill_long": hang_drill.table,
    "versions": versions_drill.table,
    "peers_drill": peers_drill.table,
    "s3_drill": s3_drill.table,
    "doctor_drill": doctor_drill.table,
    "aws_drill": aws_drill.table,
    "attack_drill": attack_drill.table,
    "chaos_drill": chaos_drill.table,
}


def main() -> None:
    text = (HERE / "README.md").read_text()
    for name, table in TABLES.items():
        path = HERE / "results" / f"{name}.json"
        if not path.exists():
            continue
        results = json.loads(path.read_text())
        machine = ", ".join(f"{what} {value}" for what, value in results["machine"].items())
        written = f"{table(results)}\n\n`{results['command']}`: {machine}."
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda at, written=written: f"{at[1]}{written}\n{at[2]}", text, flags=re.DOTALL)
    (HERE / "README.md").write_text(text)


def _as_code(table: str) -> str:
    return f"```\n{table.strip()}\n```"


if __name__ == "__main__":
    main()
