"""Writes the tables of strategies.md: which features go with which strategy, from the code.

python docs/fill_strategies.py             rewrites the text between <!-- features --> and <!-- /features -->
"""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.plan.features import FEATURES, cell
from lockstep.strategies.record import Cell
from lockstep.strategies.registry import layouts

PAGE = Path(__file__).parent / "strategies.md"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    filled = re.sub(
        r"(<!-- features -->\n).*?(<!-- /features -->)",
        lambda match: f"{match[1]}{table()}{match[2]}",
        page,
        flags=re.DOTALL,
    )
    PAGE.write_text(filled, encoding="utf-8")


def table() -> str:
    """Return the tables of docs/strategies.md: one for each family, with a row for each feature."""
    notes: list[str] = []
    parts = []
    columns = list(layouts().values())
    for family in dict.fromkeys(layout.family for layout in columns):
        members = [layout for layout in columns if layout.family == family]
        rows = [["", *(layout.name for layout in members)], ["---"] * (len(members) + 1)]
        rows += [
            [feature.name, *(_shown(cell(layout, feature.name), notes) for layout in members)] for feature in FEATURES
        ]
        parts += [f"### {family}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*parts, "### Notes", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]) + "\n"


def _shown(state: Cell, notes: list[str]) -> str:
    if not state.why:
        return str(state)
    note = f"{state.standing}: {state.why}"
    if note not in notes:
        notes.append(note)
    return f"{state.standing} ({notes.index(note) + 1})"


if __name__ == "__main__":
    main()
