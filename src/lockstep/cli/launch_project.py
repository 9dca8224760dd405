"""Writes the files that a project needs: lockstep launch WHERE --init.

ProjectLauncher.project_files --> ProjectFiles --> written, unless a file of that name is there
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.terminal import echo
from lockstep.launchers.tools import write_files

if TYPE_CHECKING:
    from argparse import Namespace

    from pydantic import BaseModel

    from lockstep.core.protocols import ProjectLauncher


def refuse_others(where: str, args: Namespace, words: Sequence[str]) -> None:
    """Raise ConfigError if the command line also asks for a job."""
    given = [*words[:1], *(flag for flag, value in (("--follow", args.follow), ("--sweep", args.sweep)) if value)]
    if given:
        raise ConfigError(f"lockstep launch {where} --init writes files and starts nothing; leave out {given[0]}")


def write_project(launcher: ProjectLauncher, options: BaseModel, *, dry_run: bool) -> int:
    """Write the files into the current folder, or print them; return the exit code. Raises ConfigError."""
    folder = Path.cwd()
    project = launcher.project_files(folder, options)
    for note in project.notes:
        echo(f"note: {note}", file=sys.stderr)
    if dry_run:
        print_files(project.files)
        return 0
    missing = _missing(project.files)
    write_files(missing)
    for path in project.files:
        echo(f"wrote {short(path)}" if path in missing else f"{short(path)} is there, with the same content")
    echo("\nnext:")
    for line in project.next_commands:
        echo(f"  {line}")
    return 0


def _missing(files: Mapping[Path, str]) -> dict[Path, str]:
    """Return the files that aren't there. Raises ConfigError: another file of that name is."""
    others = [str(short(path)) for path, text in files.items() if os.path.lexists(path) and not _is_same(path, text)]
    if others:
        verb, them = ("exists", "it") if len(others) == 1 else ("exist", "them")
        raise ConfigError(
            f"{', '.join(others)} {verb} with another content, and nothing was written; move {them} away, or print "
            "what would be written: --init --dry-run"
        )
    return {path: text for path, text in files.items() if not path.exists()}


def _is_same(path: Path, text: str) -> bool:
    try:
        return read_bounded(path, MAX_JSON_BYTES) == text.encode()
    except OSError:
        return False


def print_files(files: Mapping[Path, str]) -> None:
    """Print what would be written."""
    for path, text in files.items():
        echo(f"would write {short(path)}:", file=sys.stderr, flush=True)
        echo(text, end="", flush=True)


def short(path: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
