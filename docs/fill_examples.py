"""Puts the files of examples/ and the table of failures into the pages that show them: `python docs/fill_examples.py`.

<!-- file: examples/squares.py -->
```python
the content of the file
```
"""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.core.failure_kinds import FailureKind

ROOT = Path(__file__).parents[1]
_SHOWN = re.compile(r"(<!-- file: (\S+) -->\n```\w+\n)(.*?)(```\n)", re.DOTALL)
_KINDS = re.compile(r"(<!-- failure kinds -->\n).*?(<!-- /failure kinds -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the page's text with the current content of each file, and of the table."""
    page = _SHOWN.sub(lambda shown: shown[1] + (ROOT / shown[2]).read_text() + shown[4], page)
    return _KINDS.sub(lambda shown: shown[1] + _kinds() + shown[2], page)


def _kinds() -> str:
    """Return a row for each way in which a run ends."""
    rows = ["| kind | exit code | starts again | why |", "| --- | --: | --- | --- |"]
    for kind in FailureKind:
        if kind is not FailureKind.DONE:
            why = kind.cause or kind.title.capitalize() + "."
            rows.append(f"| `{kind.name.lower()}` | {kind.exit_code} | {kind.retry.value} | {why} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
