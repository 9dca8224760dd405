"""Hooks of mkdocs: pages that are kept outside of docs/ become pages of the site, and links follow them.

    CHANGELOG.md           -->  changelog.html
    examples/squares.py    -->  examples/squares.py, as it is

The same Markdown is read in the repository, where links lead to files, and on the site, where they lead to pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "drills/README.md": "drills.md",
    "tests/compatibility/table.md": "models-tried.md",
}
ELSEWHERE = {"README.md": "index.md", "src/lockstep/core/protocols.py": "api.md"}
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the examples that are kept outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for example in sorted((ROOT / "examples").rglob("*")):
        if example.suffix in (".py", ".yaml", ".json", ".sh"):
            name = example.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links between files of the repository as links between pages of the site."""
    source = next((file for file, name in PAGES.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        return before + site_target(source, target) + after

    parts = re.split(f"({_FENCE.pattern})", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)


def site_target(source: str, target: str) -> str:
    """Return the link of the site for `target`, which the repository's file `source` links to."""
    if re.match(r"\w+:|#", target):
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return PAGES.get(path) or ELSEWHERE.get(path) or path.removeprefix("docs/")
