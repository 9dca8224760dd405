"""Run the cells of the compatibility table and write it: `python drills/compatibility_table.py [--strategies A,B]`.

tests/compatibility/table.json    for the tests
tests/compatibility/table.md      for readers

Read the changes before you commit: a cell that was `same` and no longer is shows a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
PLACE = TESTS / "compatibility"
_MAX_LENGTH = 400  # characters of a message
Table = dict[str, dict[str, dict[str, str]]]


def main() -> None:
    from compatibility.cells import STRATEGIES, all_names, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    strategies = parser.parse_args().strategies.split(",")
    place = PLACE / "table.json"
    table: Table = json.loads(place.read_text()) if place.exists() else {}
    for (name, strategy), cell in run(strategies, all_names()).items():
        table.setdefault(name, {})[strategy] = {"status": cell.status, "message": _plain(cell.message)}
    for strategy in strategies:
        print(strategy, dict(Counter(row[strategy]["status"] for row in table.values())), flush=True)
    ordered = {name: {of: table[name][of] for of in STRATEGIES if of in table[name]} for name in all_names()}
    place.write_text(json.dumps(ordered, indent=1) + "\n")
    (PLACE / "table.md").write_text(_page(ordered))


def _plain(message: str) -> str:
    """Return the message without addresses and paths of libraries."""
    message = re.sub(r"/\S*/site-packages/", "", re.sub(r"0x[0-9a-f]+", "0x...", message))
    return message if len(message) <= _MAX_LENGTH else f"{message[:_MAX_LENGTH]}..."


def _page(table: Table) -> str:
    from compatibility.cells import STRATEGIES
    from compatibility.families import FAMILIES

    statuses = Counter(cell["status"] for row in table.values() for cell in row.values())
    parts = [
        "# Compatibility",
        "Written by `python drills/compatibility_table.py`. `same`: losses, gradients and published weights match a "
        "single process. `varies`: they differ by design, because the model's loss depends on how batches are split or "
        "padded. `refused`: for the reason below. `failed`: anything else (below).",
        ", ".join(f"{number} {status}" for status, number in statuses.most_common()) + ".",
        f"## {len(FAMILIES)} families of the transformers library",
        _rows({name: row for name, row in table.items() if name in FAMILIES}, list(STRATEGIES)),
        f"## {len(table) - len(FAMILIES)} user-defined models, objectives, optimizers and datasets",
        _rows({name: row for name, row in table.items() if name not in FAMILIES}, list(STRATEGIES)),
        "## Failed",
        _messages(table, "failed") or "None.",
        "## Refused",
        _messages(table, "refused"),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(table: Table, strategies: list[str]) -> str:
    lines = [f"| | {' | '.join(strategies)} |", f"| --- |{' --- |' * len(strategies)}"]
    lines += [
        f"| {name} | {' | '.join(row[of]['status'] if of in row else '' for of in strategies)} |"
        for name, row in table.items()
    ]
    return "\n".join(lines)


def _messages(table: Table, status: str) -> str:
    """Return each message once, with its cells."""
    cells: dict[str, dict[str, list[str]]] = {}
    for name, row in table.items():
        for strategy, cell in row.items():
            if cell["status"] == status:
                cells.setdefault(" ".join(cell["message"].split()), {}).setdefault(name, []).append(strategy)
    return "\n".join(f"- {_of(of)}: {message}" for message, of in cells.items())


def _of(cells: dict[str, list[str]]) -> str:
    return "; ".join(f"{name} ({', '.join(strategies)})" for name, strategies in cells.items())


if __name__ == "__main__":
    main()
