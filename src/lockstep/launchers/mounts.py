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
from lockstep.core.terminal import plain_line


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of this machine, and its path in the container; both normalized."""

    host: str
    target: str
    read_only: bool = False

    def on_host(self, path: str) -> str | None:
        """Return where this machine has a path of the container; None: it isn't in this mount."""
        return _moved(path, self.target, self.host)

    def in_container(self, path: str) -> str | None:
        """Return where the container has a path of this machine; None: it isn't in this mount."""
        return _moved(path, self.host, self.target)


def _moved(path: str, old: str, new: str) -> str | None:
    return os.path.normpath(Path(new, Path(path).relative_to(old))) if Path(path).is_relative_to(old) else None


def is_seen(path: str | Path, mounts: Sequence[Mount], *, writing: bool = False) -> bool:
    """Return whether a container sees at this path what this machine has there, or can write there.

    Args:
        path: As the command names it, absolute.
    """
    place = os.path.normpath(path)
    usable = [mount for mount in mounts if not (writing and mount.read_only)]
    holding = [mount for mount in mounts if mount.on_host(place) is not None]
    if not holding:
        return False
    nearest = max(holding, key=lambda mount: len(mount.target))
    real = os.path.realpath(nearest.on_host(place) or "")
    if Path(real).is_relative_to(os.path.realpath(nearest.host)):
        return nearest in usable
    return any(mount.host == mount.target and Path(real).is_relative_to(mount.target) for mount in usable)


def unseen_problems(
    texts: Sequence[str], mounts: Sequence[Mount], folder: Path, flag: str, read_only: str
) -> list[Problem]:
    """Return a problem for each path that exists here and that a container doesn't see.

    Args:
        texts: Paths, as the command or its config names them.
        folder: Where the command runs.
        flag: Of the launcher, with which a folder is mounted.
        read_only: What its value ends with if the container only reads the folder.
    """
    paths = {text: os.path.normpath(folder / Path(text).expanduser()) for text in texts}
    return [
        Problem(plain_line(text), "", f"the containers don't see it: {_reason(path, mounts, flag, read_only)}")
        for text, path in paths.items()
        if not is_seen(path, mounts)
    ]


def _reason(path: str, mounts: Sequence[Mount], flag: str, read_only: str) -> str:
    real = os.path.realpath(path)
    what = f"{plain_line(path)} is in no folder that they have"
    if real != path and any(mount.on_host(path) is not None for mount in mounts):
        what = f"it leads to {plain_line(real)}, which is in no folder that they have"
    elsewhere = [place for mount in mounts if (place := mount.in_container(path)) is not None and place != path]
    if elsewhere:
        what = f"they have it at {plain_line(elsewhere[0])}, and the command names it otherwise"
    return f"{what}; give {mounting(flag, real, read_only)}"


def mounting(flag: str, path: str | Path, ending: str = "") -> str:
    """Return the flag that mounts a path at the same path of the container, for a shell."""
    if set(str(path)) & {":", ","}:
        return f"{flag} with a copy of it, at a path without colons and commas"
    return f"{flag} {shlex.quote(f'{path}:{path}{ending}')}"
