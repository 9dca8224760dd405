"""The save of a run's last state where its own folder can't take it: a new run folder, from which the run resumes.

RUN/checkpoints: Read-only file system --> working directory, then the folder for temporary files --> RUN-unsaved-x7f2/
"""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.ownership import Owner
from lockstep.config.trust import recorded
from lockstep.core.errors import RunFailed
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.monitor.folder import CHECKPOINTS, ENVIRONMENT, RunFolder
from lockstep.monitor.goodput import saved_steps
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.checkpoints import Checkpoints
    from lockstep.training.session import Session


def save_elsewhere(session: Session, checkpoints: Checkpoints, folder: Path) -> Path | None:
    """Save the session's state in a new run folder, all ranks together; return it, or None if no place takes it.

    Args:
        folder: of the run, after which the new one is named.
    """
    axis = components_of(session).world.axis
    for parent in cast("list[Path]", axis.broadcast([*dict.fromkeys(_parents())])):  # of the first rank
        place = _save_below(parent, session, checkpoints, folder.name)
        if place is not None:
            return place
    return None


def saved_elsewhere(folder: Path, run: object, parents: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders in which a run has saved what its own folder couldn't take.

    Args:
        run: Its id.
        parents: Where to look, beside the working directory and the folder for temporary files.
    """
    for parent in dict.fromkeys((*parents, *_parents())):
        with suppress(OSError, ValueError):
            for place in sorted(parent.glob(f"{glob.escape(folder.resolve().name)}-unsaved-*")):
                if run is not None and _id(place) == run:
                    yield place


def _parents() -> Iterator[Path]:
    """Yield where such folders are made; the working directory may have been deleted."""
    with suppress(OSError):
        yield Path.cwd()
    with suppress(OSError):
        yield Path(tempfile.gettempdir())


def is_saved_elsewhere(folder: Path, run: str, step: int) -> bool:
    """Return whether such a folder has the state after this step, or a newer one."""
    return any(max(saved_steps(place), default=-1) >= step for place in saved_elsewhere(folder, run, ()))


def _id(folder: Path) -> object:
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(read_bounded(folder / ENVIRONMENT, MAX_JSON_BYTES)).get("run")
    return None


def _save_below(parent: Path, session: Session, checkpoints: Checkpoints, name: str) -> Path | None:
    axis, place = components_of(session).world.axis, None
    if axis.rank == 0:
        with suppress(OSError):
            place = Path(tempfile.mkdtemp(prefix=f"{name}-unsaved-", dir=parent))
    place = cast("Path | None", axis.broadcast(place))
    if place is None:
        return None
    is_saved = False
    if all(axis.gather(place.is_dir())):  # not on another host's disk
        is_saved = checkpoints.save_in(LocalStorage(place / CHECKPOINTS)) is None
    if axis.rank == 0 and is_saved:
        is_saved = _make_run_folder(place, components_of(session).config, checkpoints)
    is_saved = bool(axis.broadcast(is_saved))
    if axis.rank == 0 and not is_saved:
        shutil.rmtree(place, ignore_errors=True)
    return place if is_saved else None


def _make_run_folder(place: Path, config: Config, checkpoints: Checkpoints) -> bool:
    """Write what makes a folder that of the run, with its checkpoints inside; return whether that was possible."""
    moved = config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": str(place)}),
            "checkpoint": config.checkpoint.model_copy(update={"folder": None}),
        }
    )
    try:
        folder = RunFolder(place)
        folder.write_config(recorded(moved, checkpoints.run))
        folder.write_environment({**checkpoints.environment, "run": checkpoints.run})
        LocalStorage(place / CHECKPOINTS).set_owner(Owner(checkpoints.run, str(place), place.name))
    except (RunFailed, OSError):
        return False
    return True
