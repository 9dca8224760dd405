"""The result of a check, as text and for programs, and the machine as a check sees it."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.core.terminal import plain_line


class FindingState(Enum):
    """The state of a check, the worst first."""

    WRONG = "wrong"  # training fails
    WARNING = "warning"  # slow, or fails in some runs
    OK = "ok"
    NOT_HERE = "not here"  # and needn't be


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact that a check saw, and what to do; `examine` fills in the check's name."""

    state: FindingState
    seen: str
    remedy: str = ""
    name: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "state": self.state.value, "seen": self.seen, "remedy": self.remedy}


def ok(seen: str) -> Finding:
    return Finding(FindingState.OK, seen)


def not_here(seen: str) -> Finding:
    return Finding(FindingState.NOT_HERE, seen)


def warning(seen: str, remedy: str) -> Finding:
    return Finding(FindingState.WARNING, seen, remedy)


def wrong(seen: str, remedy: str) -> Finding:
    return Finding(FindingState.WRONG, seen, remedy)


def _file_time(folder: Path) -> float:
    file = folder / f".lockstep-clock-{socket.gethostname()}-{os.getpid()}"
    try:
        file.write_bytes(b"")
        return file.stat().st_mtime
    finally:
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class MachineView:
    """The machine as checks see it; a test replaces a part.

    Attributes:
        folder: Where runs are written; need not exist.
        cache: Where models and datasets are cached; need not exist.
        port: `launch.port`; 0: any.
        device: `launch.device`.
        root: The folder of `proc`, `sys` and `dev`.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    search_path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    folder: Path = Path("runs")
    cache: Path = field(default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    port: int = 0
    device: str = "auto"
    root: Path = Path("/")
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    file_time: Callable[[Path], float] = _file_time

    def existing(self, path: Path) -> Path:
        """Return the path, or the nearest folder above it that exists."""
        path = path.expanduser().absolute()
        return next((place for place in (path, *path.parents) if place.exists()), Path("/"))

    def text(self, path: str) -> str:
        """Return a file's text; empty if it can't be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; none if it can't be read."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []


def describe(findings: Sequence[Finding], width: int | None) -> str:
    """Return the findings as text; `width` None: for a file, no line is broken or cut."""
    counts = {state: sum(finding.state is state for finding in findings) for state in FindingState}
    plural = {FindingState.WARNING: "s" * (counts[FindingState.WARNING] > 1)}
    lines = [", ".join(f"{count} {state.value}{plural.get(state, '')}" for state, count in counts.items() if count)]
    for finding in sorted(findings, key=lambda finding: finding.state is not FindingState.WRONG):
        if finding.state in (FindingState.WRONG, FindingState.WARNING):
            lines += ["", f"{finding.state.value}: {finding.name}", *wrapped(finding.seen, "  ", width)]
            lines += wrapped(f"-> {finding.remedy}", "  ", width, "     ")
    name_width = max((len(finding.name) for finding in findings), default=0)
    lines.append("")
    for state in (FindingState.OK, FindingState.NOT_HERE):
        for finding in (finding for finding in findings if finding.state is state):
            line = f"{state.value:<8}  {finding.name:<{name_width}}  {plain_line(finding.seen)}"
            lines.append(line if width is None or len(line) <= width else f"{line[: width - 1]}…")
    return "\n".join(lines).rstrip()


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for `--json`."""
    return {
        "wrong": sum(finding.state is FindingState.WRONG for finding in findings),
        "warnings": sum(finding.state is FindingState.WARNING for finding in findings),
        "findings": [finding.as_json() for finding in findings],
    }


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 3 if something is wrong, otherwise 0."""
    return 3 if any(finding.state is FindingState.WRONG for finding in findings) else 0


def wrapped(
    text: str, indent: str, width: int | None, further: str | None = None, *, breaks: bool = False
) -> list[str]:
    """Return a paragraph as lines; without a width it has one line.

    Args:
        further: Indent of the lines after the first; by default the same.
        breaks: Break words that are longer than a line, such as paths.
    """
    if width is None:
        return [f"{indent}{plain_line(text)}"]
    return textwrap.wrap(
        plain_line(text),
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_on_hyphens=False,
        break_long_words=breaks,
    )
