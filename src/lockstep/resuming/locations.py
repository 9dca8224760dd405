"""Finds the checkpoints that a path on the command line refers to. Importing this needs no torch.

runs/digits                              a run            all its checkpoints, wherever its config has put them
runs/digits/checkpoints                  a folder of checkpoints
runs/digits/checkpoints/step-00000480    one checkpoint
s3://bucket/saves, .../step-00000480     checkpoints, or one, in an object store
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.inspection import is_checkpoint
from lockstep.checkpoint.local import LocalStorage, repeated
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.known_runs import id_of_run
from lockstep.config.schema import GIVEN, Checkpoint, Config
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.extensions import instance
from lockstep.core.near_runs import did_you_mean_run
from lockstep.core.protocols import ObjectStore
from lockstep.monitor.folder import CHECKPOINTS, CONFIG, LOCK, RunFolder, is_run, open_lock, refuse_escaping_links
from lockstep.stores.addresses import is_address
from lockstep.stores.blobs import UserStore
from lockstep.stores.buckets import open_store

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.loading import LoadedConfig


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The checkpoints that a path refers to.

    Attributes:
        run: folder of the run that they belong to, if known.
        loaded: the config of that run, not yet approved, if known.
        name: of the checkpoint that the path refers to; None: it refers to all.
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


def checkpoint_folder(checkpoint: Checkpoint, run: Path) -> Path:
    """Return the absolute folder of a run's checkpoints. Raises ConfigError if that is a file."""
    place = Path(checkpoint.folder or run / CHECKPOINTS).absolute()
    if repeated(lambda: place.exists() and not place.is_dir(), checkpoint.retry_seconds, place):
        raise ConfigError(Problem("", "checkpoint.folder", f"{place} is a file; name a folder"))
    return place


def storage_of(checkpoint: Checkpoint, run: Path, given: ObjectStore | None = None) -> Storage:
    """Return the storage of a run's checkpoints, of which `given` was passed in Python. Raises ConfigError."""
    place: str | Path | ObjectStore
    if (section := checkpoint.storage) is None:
        folder = checkpoint.folder or ""
        place = folder if is_address(folder) else checkpoint_folder(checkpoint, run)
    elif section.target != GIVEN:
        place = instance("storage", section.target, section.arguments, ObjectStore, key="checkpoint.storage.target")
    elif given is not None:
        place = given
    else:
        why = "the checkpoints are in a storage that was passed in Python; pass it again"
        raise ConfigError(Problem("", "checkpoint.storage.target", why))
    return storage_at(place, checkpoint.retry_seconds, id_of_run(run))


def storage_at(place: str | os.PathLike[str] | ObjectStore, retry_seconds: float, run: str | None = None) -> Storage:
    """Return the storage in a folder, at an address, or in an object store."""
    if not isinstance(place, str | os.PathLike):
        return ObjectStorage(UserStore(place), run)
    if is_address(os.fspath(place)):
        return ObjectStorage(open_store(os.fspath(place), retry_seconds), run)
    return LocalStorage(Path(place).absolute(), run, retry_seconds=retry_seconds)


def find(path: Path | str, *, trusted: bool = False) -> CheckpointLocation:
    """Return the checkpoints that a path or the address of an object store refers to.

    Args:
        trusted: the config of another user's run may name a folder of checkpoints outside the run's folder.

    Raises:
        ConfigError: the path is no run or checkpoints; or another user's run that points outside its folder.
    """
    if isinstance(path, str):
        return _at_address(path)
    where = path.absolute()
    if is_run(where):
        return _of_run(where, trusted=trusted)
    if is_checkpoint(where):
        return replace(_of_folder(where.parent), name=where.name)
    if where.is_dir():
        storage = LocalStorage(where)
        if names_by_step(storage.names()) or storage.moved_aside() or where.name == CHECKPOINTS:
            return _of_folder(where)
    near = did_you_mean_run(path)
    if not path.exists():
        near = near or "; give a run's folder, its folder of checkpoints, or one of them"
        raise ConfigError(f"{path} doesn't exist{near}")
    raise ConfigError(f"{path} is neither a run's folder, nor a folder of checkpoints, nor a checkpoint{near}")


def _at_address(address: str) -> CheckpointLocation:
    parent, _, last = address.rstrip("/").rpartition("/")
    name = last if names_by_step([last]) else None
    storage = ObjectStorage(open_store(address if name is None else parent))
    with reachable(storage):
        if not storage.names() and not storage.moved_aside():
            raise ConfigError(f"there are no checkpoints in {storage.place}")
    return CheckpointLocation(storage, name=name)


@contextmanager
def reachable(storage: Storage) -> Iterator[None]:
    """Turn an OSError into a ConfigError with the storage's name."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or storage.place}: {error.strerror or error}") from error


def readable_manifest(storage: Storage, name: str) -> Manifest | None:
    """Return a checkpoint's manifest; None if it is damaged: the run will report that and use an earlier one."""
    try:
        return read_manifest(storage, name)
    except CorruptCheckpoint:
        return None


def choose(location: CheckpointLocation, step: int | None) -> str:
    """Return the name of the checkpoint of `step`; None: of the path's, or of the newest. Raises ConfigError."""
    if location.name is not None:
        if step is not None:
            raise ConfigError(f"--step selects one of several checkpoints, and {location.where(location.name)} is one")
        return location.name
    steps = names_by_step(location.storage.names())
    if not steps:
        raise ConfigError(f"there is no checkpoint in {location.place}")
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        nearest = min(steps, key=lambda known: abs(known - step))
        raise ConfigError(f"{location.place} has no checkpoint of step {step}; the nearest is of step {nearest}")
    return steps[step]


def _of_run(run: Path, *, trusted: bool = False) -> CheckpointLocation:
    from lockstep.config.trust import approved, outside

    refuse_escaping_links(run)
    file = run / CONFIG
    if not file.is_file():
        return CheckpointLocation(LocalStorage(run / CHECKPOINTS, id_of_run(run)), run)
    loaded = loaded_config(run)
    section = loaded.config.checkpoint
    if section.storage is not None:
        section = approved(loaded, trusted=trusted).checkpoint  # the storage is code that the run's config names
    folder = section.folder
    if folder is not None and not trusted and loaded.runs[0].known is None and outside(folder, run):
        place = folder if is_address(folder) else Path(folder).absolute()
        raise ConfigError(
            f"{file}: checkpoint.folder is {place}, outside of the run's folder, and you have not "
            "started that run here; if you mean that folder, name it instead of the run"
        )
    return CheckpointLocation(storage_of(section, run), run, loaded)


def _of_folder(folder: Path) -> CheckpointLocation:
    """Return a folder of checkpoints, with its run if that keeps its checkpoints there."""
    if folder.name == CHECKPOINTS and is_run(folder.parent):
        location = _of_run(folder.parent, trusted=True)  # what is returned is in the folder that the user named
        if location.place == str(folder):
            return location
    return CheckpointLocation(LocalStorage(folder))


def loaded_config(run: Path) -> LoadedConfig:
    """Return the resolved config in a run's folder, and whether this user started the run."""
    from lockstep.config.loading import load

    file = RunFolder.open(run).path / CONFIG
    return load([file], environ={}, of_runs=[file])


def run_config(run: Path) -> Config:
    """Return the resolved config in a run's folder, without secrets."""
    return loaded_config(run).config


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Prevent the run from being trained while the block runs. Raises RunFailed if it is being trained."""
    if not (run / LOCK).exists():  # the command never started it here
        yield
        return
    handle, holder = open_lock(run)
    try:
        if holder is not None:
            why = f"the run in {run} is being trained ({holder}) and prunes by itself"
            raise RunFailed(f"{why}; --dry-run shows what would be deleted")
        yield
    finally:
        os.close(handle)
