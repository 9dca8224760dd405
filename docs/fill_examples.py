"""Puts the files of examples/ into the pages that show them: `python docs/fill_examples.py`.

<!-- file: examples/squares.py -->
```python
the content of the file
```
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SHOWN = re.compile(r"(<!-- file: (\S+) -->\n```\w+\n)(.*?)(```\n)", re.DOTALL)


def filled(page: str) -> str:
    """Return the page's text with the current content of each file."""
    return _SHOWN.sub(lambda shown: shown[1] + (ROOT / shown[2]).read_text() + shown[4], page)


def main() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
