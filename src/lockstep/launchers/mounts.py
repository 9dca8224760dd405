"""Mounts of a container, and the paths of this machine that it sees through them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import Problem
from lockstep.core.jobs import JobCommand
from lockstep.core.terminal import plain_line
from lockstep.stores.addresses import is_address


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of this machine, and its path in the container; both normalized."""

    host: str
    target: str
    read_only: bool = False


def mount_problems(
    command: JobCommand, mounts: Sequence[Mount], folder: Path, flag: str, read_only: str
) -> list[Problem]:
    """Return a problem for each path of the command that a container doesn't see, and for a run that it would lose.

    `flag` mounts a folder, with a value that ends with `read_only` if the container only reads it.
    """
    problems = []
    for text in command.paths:
        path = folder / Path(text).expanduser()
        if not _is_seen(path, mounts):
            real = plain_line(os.path.realpath(path))
            why = f"the containers don't see it; give {flag} {shlex.quote(f'{real}:{real}{read_only}')}"
            problems.append(Problem(plain_line(text), "", why))
    place = command.checkpoint_folder
    kept = folder / (place or command.run_folder)
    if command.starts_run and not is_address(str(place)) and not _is_seen(kept, mounts, writing=True):
        real = str(Path(os.path.realpath(kept)).parent)
        why = f"would be lost with the container; give {flag} {shlex.quote(f'{real}:{real}')}"
        problems.append(Problem("", "run.folder" if place is None else "checkpoint.folder", why))
    return problems


def _is_seen(path: Path, mounts: Sequence[Mount], *, writing: bool = False) -> bool:
    """Return whether a container sees at this path what this machine has there, or can write there."""
    place = Path(os.path.normpath(path))
    holding = [mount for mount in mounts if place.is_relative_to(mount.target)]
    if not holding:
        return False
    nearest = max(holding, key=lambda mount: len(mount.target))
    real = Path(os.path.realpath(Path(nearest.host, place.relative_to(nearest.target))))
    if real.is_relative_to(os.path.realpath(nearest.host)):
        return not (writing and nearest.read_only)
    others = [mount for mount in mounts if mount.host == mount.target and real.is_relative_to(mount.target)]
    return any(not (writing and mount.read_only) for mount in others)
