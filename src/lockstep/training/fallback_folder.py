"""Where a run's last state goes when its own folder can't take it: a new run folder, from which the run resumes.

RUN/checkpoints: Read-only file system --> working directory, then the folder for temporary files --> RUN-unsaved-x7f2/
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.ownership import Owner
from lockstep.config.known_runs import recorded
from lockstep.core.errors import RunFailed
from lockstep.monitor.folder import CHECKPOINTS, RunFolder
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.checkpoints import Checkpoints
    from lockstep.training.session import Session


def save_elsewhere(session: Session, checkpoints: Checkpoints, folder: Path) -> Path | None:
    """Saves the session's state in a new run folder, all ranks together; returns it, or None if no place takes it.

    Args:
        folder: of the run, which gives the new one its name.
    """
    for parent in dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir()))):
        place = _save_below(parent, session, checkpoints, folder)
        if place is not None:
            return place
    return None


def _save_below(parent: Path, session: Session, checkpoints: Checkpoints, folder: Path) -> Path | None:
    axis = components_of(session).world.axis
    place = cast("Path | None", axis.broadcast(_new_folder(parent, folder.name) if axis.rank == 0 else None))
    if place is None:
        return None
    saved = False
    if all(axis.gather(place.is_dir())):  # not on another host's disk
        saved = checkpoints.save_in(LocalStorage(place / CHECKPOINTS)) is None
    if axis.rank == 0 and saved:
        saved = _describe(place, components_of(session).config, checkpoints)
    saved = bool(axis.broadcast(saved))
    if axis.rank == 0 and not saved:
        shutil.rmtree(place, ignore_errors=True)
    return place if saved else None


def _new_folder(parent: Path, name: str) -> Path | None:
    try:
        return Path(tempfile.mkdtemp(prefix=f"{name}-unsaved-", dir=parent))
    except OSError:
        return None


def _describe(place: Path, config: Config, checkpoints: Checkpoints) -> bool:
    """Whether the folder could be made that of a run, which keeps its checkpoints there."""
    here = config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": str(place)}),
            "checkpoint": config.checkpoint.model_copy(update={"folder": None}),
        }
    )
    try:
        folder = RunFolder(place)
        folder.write_config(recorded(here, checkpoints.run))
        folder.write_environment({**checkpoints.environment, "run": checkpoints.run})
        LocalStorage(place / CHECKPOINTS).set_owner(Owner(checkpoints.run, str(place), place.name))
    except (RunFailed, OSError):
        return False
    return True
