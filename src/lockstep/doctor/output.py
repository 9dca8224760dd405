"""Findings as text: what is wrong first, then one line for each thing that is fine."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from lockstep.core.terminal import plain_line
from lockstep.doctor.findings import Finding, FindingState


def describe(findings: Sequence[Finding], width: int | None) -> str:
    """Return the findings as text of at most `width` columns; None: for a file, in which no line is broken or cut.

    1 wrong, 19 ok, 2 not here

    wrong: port
      port 29500 is taken by process 812 (python serve.py)
      -> End that process, or set launch.port to another port.

    ok        Python          3.11.2 at /usr/bin/python
    """
    counts = {state: sum(finding.state is state for finding in findings) for state in FindingState}
    lines = [", ".join(_counted(state, count) for state, count in counts.items() if count)]
    for state in (FindingState.WRONG, FindingState.WARNING):
        for finding in findings:
            if finding.state is state:
                lines += ["", f"{state.value}: {finding.name}", *wrapped(finding.seen, "  ", width)]
                lines += wrapped(f"-> {finding.remedy}", "  ", width, "     ")
    name_width = max((len(finding.name) for finding in findings), default=0)
    lines.append("")
    for state in (FindingState.OK, FindingState.NOT_HERE):
        for finding in findings:
            if finding.state is state:
                line = f"{state.value:<8}  {finding.name:<{name_width}}  {plain_line(finding.seen)}"
                lines.append(line if width is None or len(line) <= width else f"{line[: width - 1]}…")
    return "\n".join(lines).rstrip()


def _counted(state: FindingState, count: int) -> str:
    return f"{count} {state.value}{'s' * (state is FindingState.WARNING and count > 1)}"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for `--json`, in the order of the checks, and how many are wrong."""
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
        further: Indent of the lines after the first; None: the same.
        breaks: Whether words that are longer than a line, such as paths, are broken, too.
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
