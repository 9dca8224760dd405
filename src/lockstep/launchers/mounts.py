"""Mounts of a container, and the paths of this machine that it sees through them.

/home/me/project:/home/me/project                      run.yaml, data/a        seen
                                                       ../x.yaml, /data/b      unseen: give --volume /data/b:/data/b:ro
                                                       data -> /data           unseen: the link leads out of the mounts
"""

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

    Args:
        folder: Where the command runs.
        flag: Of the launcher, with which a folder is mounted.
        read_only: What its value ends with if the container only reads the folder.
    """
    problems = []
    for text in command.paths:
        path = os.path.normpath(folder / Path(text).expanduser())
        if not _is_seen(path, mounts):
            real = os.path.realpath(path)
            why = f"{plain_line(real)} is in no folder that they have at this path"
            message = f"the containers don't see it: {why}; give {_mounting(flag, real, read_only)}"
            problems.append(Problem(plain_line(text), "", message))
    place = command.checkpoint_folder
    kept = folder / (place or command.run_folder)
    if command.starts_run and not is_address(str(place)) and not _is_seen(kept, mounts, writing=True):
        outside = Path(os.path.realpath(kept))
        why = f"{outside} is in no folder that it can write to; give {_mounting(flag, outside.parent)}"
        key = "run.folder" if place is None else "checkpoint.folder"
        problems.append(Problem("", key, f"would be lost with the container: {why}"))
    return problems


def _is_seen(path: str | Path, mounts: Sequence[Mount], *, writing: bool = False) -> bool:
    """Return whether a container sees at this path what this machine has there, or can write there."""
    place = Path(os.path.normpath(path))
    holding = [mount for mount in mounts if place.is_relative_to(mount.target)]
    if not holding:
        return False
    nearest = max(holding, key=lambda mount: len(mount.target))
    real = Path(os.path.realpath(Path(nearest.host, place.relative_to(nearest.target))))
    if real.is_relative_to(os.path.realpath(nearest.host)):
        return not (writing and nearest.read_only)
    return any(
        mount.host == mount.target and real.is_relative_to(mount.target) and not (writing and mount.read_only)
        for mount in mounts
    )


def _mounting(flag: str, path: str | Path, ending: str = "") -> str:
    return f"{flag} {shlex.quote(f'{path}:{path}{ending}')}"
