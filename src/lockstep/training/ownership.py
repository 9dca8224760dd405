"""The check of which run the checkpoints in `checkpoint.folder` belong to, before a run starts there.

no checkpoints                              --> this run takes the folder
this run's (its id, or its folder)          --> the run resumes
another run's: same config, not finished    --> the same command was started again: it resumes in that run's folder
another run's                               --> refused, with a free subfolder

Checkpoints in the run's own folder need no check: they are moved and copied with it. An object store (an address,
or `checkpoint.storage`) is checked by the ranks: a client that the launcher has used can't be forked with them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.ownership import Owner
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.trust import CONFIG, id_of_run
from lockstep.config.writing import to_public
from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.progress import Progress
from lockstep.launch.forking import in_fork, may_fork
from lockstep.monitor.folder import is_finished, is_run
from lockstep.monitor.jsonl import finite
from lockstep.plan.schedule import LENGTHS
from lockstep.plan.schedule import is_finished as is_at_its_end
from lockstep.stores.addresses import is_address
from lockstep.stores.buckets import RETRY_SECONDS
from lockstep.training.launch_folder import folder_of_launch
from lockstep.training.locations import checkpoint_folder, reachable, storage_of
from lockstep.training.resuming import Resume
from lockstep.training.saved_state import epoch_samples_in
from lockstep.training.session import Session, components_of

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.schema import Checkpoint, Config

_NOT_OF_THE_RUN = ("description", "launch", "monitor")  # sections that may differ between two starts of one command
_MICRO_SIZES = ("batch", "evaluation")  # sections whose `micro_size` becomes smaller when memory runs out
_OF_OPTIMIZER = ("optim.lr", "optim.weight_decay")  # settings that a custom optimizer may have by itself
_NOT_OF_THE_TRAINING = ("checkpoint", "evaluation", "parallel", "memory")  # sections that don't affect what is learned


@dataclass(frozen=True, slots=True)
class _Occupant:
    """The run whose checkpoints a folder has, and the manifest of its newest readable checkpoint, if any."""

    owner: Owner
    newest: Manifest | None

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it still exists and is still that run's."""
        if self.owner.folder is None or id_of_run(Path(self.owner.folder)) != self.owner.run:
            return None
        return Path(self.owner.folder)


def run_folder_for(config: Config, recipe: str, resume: Resume) -> Path | None:
    """Return the folder of the config, or of the run that owns `checkpoint.folder` and that this config continues.

    An elastic launch has a folder where its config names none: see `launch_folder`.

    Returns:
        None: the run needs a new folder.

    Raises:
        ConfigError: checkpoint.folder belongs to another run, or lacks the checkpoints of the run in the folder, or a
            fork would overwrite another run's files.
    """
    folder = Path(config.run.folder).absolute() if config.run.folder is not None else folder_of_launch(config, recipe)
    if resume.origin is not None and folder is not None:
        _refuse_taken_fork(config.checkpoint, folder)
    if folder is not None and resume == Resume(accept_changes=resume.accept_changes):
        _refuse_empty_place(config.checkpoint, folder)
    if config.checkpoint.folder is None:
        return folder
    if is_address(config.checkpoint.folder):
        _probe(config.checkpoint)
        return folder
    place = checkpoint_folder(config.checkpoint, Path())
    storage = LocalStorage(place, retry_seconds=config.checkpoint.retry_seconds)
    occupant = _occupant(storage)
    if occupant is None or (folder is not None and _belongs_to(folder, occupant.owner)):
        return folder
    if config.run.folder is None and _is_continued(config, occupant, fresh=resume.fresh):
        return occupant.folder
    subfolder = _free_subfolder(config.checkpoint.folder, recipe)
    remedy = f"set checkpoint.folder: {subfolder}, or leave it out: a run keeps its checkpoints in run.folder then"
    raise ConfigError(Problem("", "checkpoint.folder", _refusal(storage.place, occupant, remedy)))


def _probe(checkpoint: Checkpoint) -> None:
    """Write to a bucket and delete it again. Raises ConfigError.

    The client has threads, which a launcher that forks ranks can't have: a child process does it.
    """
    seconds = min(checkpoint.retry_seconds, RETRY_SECONDS)

    def tried() -> str:
        try:
            storage = storage_of(checkpoint.model_copy(update={"retry_seconds": seconds}), Path())
            with reachable(storage), storage.leave_marker(uuid.uuid4().hex):
                storage.names()
        except ConfigError as error:
            return str(error)
        return ""

    if why := in_fork(tried) if may_fork() else tried():
        raise ConfigError(Problem("", "checkpoint.folder", why))


def refusal_of_storage(
    config: Config, storage: Storage, folder: Path | None, *, fresh: bool = False, accept_changes: bool = False
) -> str | None:
    """Return why a run may not keep its checkpoints in a storage: it has another run's. None: it may.

    Args:
        folder: the run's; None: a session, which continues what an earlier session has saved.
        fresh: the run starts over.
        accept_changes: a session may continue a run that has other settings.
    """
    occupant = _occupant(storage)
    if occupant is None or (config.run.folder is None and _is_continued(config, occupant, fresh=fresh)):
        return None
    if folder is not None:
        remedy = "give each run a storage of its own, such as another bucket, prefix or file"
        return None if _belongs_to(folder, occupant.owner) else _refusal(storage.place, occupant, remedy)
    if accept_changes or occupant.owner.folder is None or _trains_alike(config, occupant.newest):
        return None
    remedy = "give the session a place of its own; accept_changes=True continues from these"
    return _refusal(storage.place, occupant, remedy)


def other_settings(config: Config, earlier: Config) -> list[str]:
    """Return the settings that affect what is learned and differ, as `optim.lr: 0.1 then, 0.2 now`; without lengths."""
    then, now = (dict(_flat(_of_training(to_public(settings)))) for settings in (earlier, config))
    keys = list(dict.fromkeys([*then, *now]))
    if config.optim.name == "given":  # the optimizer's own values are recorded where the config has none
        keys = [
            key
            for key in keys
            if key not in _OF_OPTIMIZER or key.removeprefix("optim.") in config.optim.model_fields_set
        ]
    return [f"{key}: {then.get(key)} then, {now.get(key)} now" for key in keys if then.get(key) != now.get(key)]


def _refuse_taken_fork(checkpoint: Checkpoint, folder: Path) -> None:
    """Raise ConfigError if a fork would overwrite another run's files."""
    if folder.is_dir() and any(folder.iterdir()):
        resume = f", or resume that run: {command_line('lockstep', 'train', folder)}" if is_run(folder) else ""
        content = "a run already" if is_run(folder) else "something else"
        raise ConfigError(f"--fork begins a new run, and {folder} holds {content}; name a new folder{resume}")
    storage = storage_of(checkpoint, folder)
    if names_by_step(storage.names()):
        why = f"{storage.place} holds checkpoints already, and a fork begins with a new one; name another folder"
        raise ConfigError(Problem("", "checkpoint.folder", why))


def _refuse_empty_place(checkpoint: Checkpoint, folder: Path) -> None:
    """Raise ConfigError if the run in a folder would start over, because its checkpoints are in another place."""
    from lockstep.training.finished_run import run_config  # which imports this module

    if not (folder / CONFIG).is_file():
        return
    try:
        then = run_config(folder).checkpoint
        if then.folder == checkpoint.folder or then.storage is not None or checkpoint.storage is not None:
            return
        before, now = storage_of(then, folder), storage_of(checkpoint, folder)
        steps, owner = names_by_step(before.names()), before.owner()
        is_own = owner is None or owner.run == id_of_run(folder)
        if before.place == now.place or not steps or not is_own or names_by_step(now.names()):
            return
    except (Failure, OSError):  # a config that can't be read, a place that is gone: the ranks report it
        return
    why = (
        f"{now.place} has no checkpoints, and the run in {folder} has its own in {before.place}, the newest of step "
        f"{max(steps):,}; copy them there to resume, leave the key out, or start over: --fresh"
    )
    raise ConfigError(Problem("", "checkpoint.folder", why))


def _occupant(storage: Storage) -> _Occupant | None:
    """Return the run whose checkpoints are in the storage; None if another run could overwrite nothing there."""
    names = names_by_step(storage.names())
    if not names:
        return None
    owner, newest = storage.owner(), _newest(storage, [names[step] for step in sorted(names, reverse=True)])
    if owner is None and newest is not None:  # checkpoints that were copied without their owner.json
        owner = Owner(newest.run, None, "a run")
    return _Occupant(owner, newest) if owner is not None else None


def _newest(storage: Storage, names: list[str]) -> Manifest | None:
    for name in names:
        try:
            return read_manifest(storage, name)
        except CorruptCheckpoint:
            continue
    return None


def _trains_alike(config: Config, newest: Manifest | None) -> bool:
    """Return whether a config learns the same as the one that a checkpoint records, perhaps under another strategy."""
    return newest is not None and _of_training(newest.config) == _of_training(finite(to_public(config)))


def _belongs_to(folder: Path, owner: Owner) -> bool:
    run = id_of_run(folder)
    if run is None:  # killed before it wrote its id
        return owner.folder == str(folder) or (owner.folder is None and (folder / CONFIG).is_file())
    is_copy = owner.folder not in (None, str(folder)) and id_of_run(Path(str(owner.folder))) == owner.run
    return run == owner.run and not is_copy


def _is_continued(config: Config, occupant: _Occupant, *, fresh: bool) -> bool:
    """Return whether this is the command that started the other run, and that run isn't finished or starts over."""
    newest, folder = occupant.newest, occupant.folder
    if newest is None or _of_run(newest.config) != _of_run(finite(to_public(config))):
        return False
    if fresh:
        return True
    if folder is not None:
        return not is_finished(folder)
    progress = Progress(newest.step, newest.samples, newest.tokens)
    return not is_at_its_end(config.run, progress, epoch_samples_in(newest))


def _refusal(place: str, occupant: _Occupant, remedy: str) -> str:
    step = f", at step {occupant.newest.step:,}" if occupant.newest is not None else ""
    folder = occupant.folder
    finished = " (finished)" if folder is not None and is_finished(folder) else ""
    resume = f". To continue the other run: {command_line('lockstep', 'train', folder)}" if folder is not None else ""
    return f"{place} holds the checkpoints of another run, {occupant.owner}{step}{finished}; {remedy}{resume}"


def _free_subfolder(folder: str, recipe: str) -> str:
    first = free = f"{folder.rstrip('/')}/{Path(recipe).stem or 'run'}"
    number = 1
    while Path(free).exists():
        number += 1
        free = f"{first}-{number}"
    return free


def _of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what may differ between two starts of one command."""
    kept = {name: section for name, section in config.items() if name not in _NOT_OF_THE_RUN}
    run = kept.get("run")
    kept_of_run = {key: value for key, value in run.items() if key != "folder"} if isinstance(run, Mapping) else {}
    for name in _MICRO_SIZES:
        if isinstance(section := kept.get(name), Mapping):
            kept[name] = {key: value for key, value in section.items() if key != "micro_size"}
    return {**kept, "run": kept_of_run}


def _of_training(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: section for name, section in _of_run(config).items() if name not in _NOT_OF_THE_TRAINING}
    return {**kept, "run": {key: value for key, value in kept["run"].items() if key not in LENGTHS}}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _flat(part, f"{key}.{name}" if key else name)


def refuse_other_run(session: Session, storage: Storage, home: Path | None, resume: Resume) -> None:
    """Raise ConfigError if the storage has another run's checkpoints; a folder of a run was checked before.

    Args:
        home: the run's folder; None: a session without one.
    """
    config, axis = components_of(session).config, components_of(session).world.axis
    if home is not None and isinstance(storage, LocalStorage):
        return
    refusal: str | None = None
    if axis.rank == 0:
        refusal = refusal_of_storage(config, storage, home, fresh=resume.fresh, accept_changes=resume.accept_changes)
    refusal = cast("str | None", axis.broadcast(refusal))
    if refusal is not None:
        key = "checkpoint.storage" if config.checkpoint.storage is not None else "checkpoint.folder"
        raise ConfigError(Problem("", "" if home is None else key, refusal))
