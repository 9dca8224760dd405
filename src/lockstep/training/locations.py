"""Which checkpoints a person means by a path; no torch is needed to find out.

runs/digits                              a run            all of its checkpoints, wherever its config has put them
runs/digits/checkpoints                  a folder of them
runs/digits/checkpoints/step-00000480    one of them
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.inspection import is_checkpoint
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.foreign_code import GIVEN
from lockstep.config.known_runs import id_of_run
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.extensions import instance
from lockstep.core.protocols import ObjectStore
from lockstep.monitor.folder import CHECKPOINTS, CONFIG, LOCK, is_run, refuse_escaping_links

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.core.protocols import ObjectStore


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The checkpoints that a path stands for.

    Attributes:
        storage: holds them.
        run: folder of the run that they belong to; None: only they were named.
        loaded: the config of that run, if it has one; not yet approved.
        name: of the single checkpoint that was named; None: all of them were.
    """

    storage: Storage
    run: Path | None = None
    loaded: LoadedConfig | None = None
    name: str | None = None

    @property
    def config(self) -> Config | None:
        return self.loaded.config if self.loaded is not None else None

    @property
    def place(self) -> str:
        """Path or address of all of them, for messages."""
        return self.storage.place

    def where(self, name: str) -> str:
        """Return the path or address of one of them, for messages."""
        return f"{self.place}/{name}"


def checkpoint_folder(config: Config, run: Path) -> Path:
    """Return the absolute folder of a run's checkpoints. Raises ConfigError if that is a file."""
    place = Path(config.checkpoint.folder or run / CHECKPOINTS).absolute()
    if place.exists() and not place.is_dir():
        raise ConfigError(Problem("", "checkpoint.folder", f"{place} is a file; name a folder"))
    return place


def storage_of(config: Config, run: Path, given: ObjectStore | None = None) -> Storage:
    """Return the storage of a run's checkpoints.

    Args:
        run: the run's folder.
        given: the object store that was passed in Python, if any.

    Raises:
        ConfigError: checkpoint.folder is a file, or checkpoint.storage can't be had.
    """
    section = config.checkpoint.storage
    if section is None:
        return LocalStorage(checkpoint_folder(config, run), id_of_run(run))
    key = "checkpoint.storage.target"
    if section.target != GIVEN:
        return ObjectStorage(
            instance("storage", section.target, section.arguments, ObjectStore, key=key), id_of_run(run)
        )
    if given is None:
        raise ConfigError(Problem("", key, "the checkpoints are in a storage that was passed in Python; pass it again"))
    return ObjectStorage(given, id_of_run(run))


def find(path: Path, *, trusted: bool = False) -> CheckpointLocation:
    """Args:
        trusted: the config of a run that somebody else has started may say where its checkpoints lie.

    Raises:
        ConfigError: it is none of the three; or it is somebody else's run, whose config or links lead elsewhere.
    """
    where = path.absolute()
    if is_run(where):
        return _of_run(where, trusted=trusted)
    if is_checkpoint(where):
        around = _around(where.parent)
        return CheckpointLocation(around.storage, around.run, around.loaded, where.name)
    if _holds_checkpoints(where):
        return _around(where)
    if not path.exists():
        raise ConfigError(f"{path} doesn't exist; give a run's folder, its folder of checkpoints, or one of them")
    raise ConfigError(f"{path} is neither a run's folder, nor a folder of checkpoints, nor a checkpoint")


def choose(place: CheckpointLocation, step: int | None) -> str:
    """The name of the checkpoint of `step`; None: of the one that was named, or of the newest.

    Raises:
        ConfigError: there is none.
    """
    if place.name is not None:
        if step is not None:
            raise ConfigError(f"--step chooses among checkpoints, and {place.where(place.name)} is one")
        return place.name
    steps = names_by_step(place.storage.names())
    if not steps:
        raise ConfigError(f"there is no checkpoint in {place.place}")
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        near = min(steps, key=lambda known: abs(known - step))
        raise ConfigError(f"{place.place} has no checkpoint of step {step}; the nearest is that of step {near}")
    return steps[step]


def _of_run(run: Path, *, trusted: bool = False) -> CheckpointLocation:
    from lockstep.config.approval import approved, outside
    from lockstep.config.loading import load

    refuse_escaping_links(run)
    file = run / CONFIG
    loaded = load([file], environ={}, of_runs=[file]) if file.is_file() else None
    if loaded is None:
        return CheckpointLocation(LocalStorage(run / CHECKPOINTS, id_of_run(run)), run)
    config = loaded.config
    if config.checkpoint.storage is not None:
        config = approved(loaded, trusted=trusted)  # the storage is code that the run's config names
    folder = config.checkpoint.folder
    if folder is not None and not trusted and loaded.runs[0].known is None and outside(folder, run):
        raise ConfigError(
            f"{file} says that its checkpoints lie in {Path(folder).absolute()}, outside of the run's folder, and you "
            "have not started that run here; if you mean that folder, name it instead of the run"
        )
    return CheckpointLocation(storage_of(config, run), run, loaded)


def _around(folder: Path) -> CheckpointLocation:
    """Return a folder of checkpoints, with the run that it is part of, if it is."""
    if folder.name == CHECKPOINTS and is_run(folder.parent):
        of_run = _of_run(folder.parent, trusted=True)  # what is returned lies where the user has said
        if of_run.place == str(folder):
            return of_run
    return CheckpointLocation(LocalStorage(folder))


def _holds_checkpoints(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (
        bool(names_by_step(LocalStorage(folder).names()) or LocalStorage(folder).moved_aside())
        or folder.name == CHECKPOINTS
    )


@contextmanager
def at_rest(run: Path) -> Iterator[None]:
    """While the block runs, nobody trains this run.

    Raises:
        RunFailed: it is under way.
    """
    try:
        handle = os.open(run / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # nobody has started it with the command here, so there is nothing to hold
        yield
        return
    try:
        _take(handle, run)
        yield
    finally:
        os.close(handle)


def _take(handle: int, run: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 1000).decode(errors="replace").strip() or "another process"
        raise RunFailed(
            f"the run in {run} is under way ({holder}) and prunes by itself; --dry-run tells what would go"
        ) from None
    except OSError:  # a file system that can't lock: as when a run is started
        pass
