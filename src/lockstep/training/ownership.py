"""Whose checkpoints `checkpoint.folder` holds, decided before a run begins there.

nobody's                              --> this run's
this run's (its id, or its folder)    --> the run resumes
another's, the same config, not done  --> the same command was started again: it resumes in that run's folder
another's                             --> refused, with a free place

Checkpoints in the run's own folder need none of this: they move and are copied with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.ownership import Owner
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.known_runs import id_of_run
from lockstep.config.writing import to_public
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.progress import Progress
from lockstep.monitor.folder import is_finished, is_run
from lockstep.monitor.jsonl import finite
from lockstep.plan.schedule import is_finished as is_at_its_end
from lockstep.training.locations import checkpoint_folder
from lockstep.training.saved_state import epoch_samples_in

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.schema import Config

LENGTHS = ("steps", "samples", "tokens", "epochs")
_NOT_OF_THE_RUN = ("description", "launch", "monitor")  # sections that may differ between two starts of one command
_CHANGES_NOTHING = ("checkpoint", "evaluation", "parallel", "memory")  # sections that don't change what is learned


@dataclass(frozen=True, slots=True)
class _Held:
    """What a folder of checkpoints holds.

    Attributes:
        newest: manifest of the newest checkpoint of `owner`; None: there is none that can be read.
    """

    owner: Owner
    newest: Manifest | None


def run_folder_for(config: Config, recipe: str, *, fresh: bool = False) -> Path | None:
    """Return the run's folder: that of the config, or of the run that `checkpoint.folder` belongs to and that this
    config continues; None: a new one.

    Args:
        fresh: the run begins anew.

    Raises:
        ConfigError: checkpoint.folder belongs to another run.
    """
    asked = Path(config.run.folder).absolute() if config.run.folder is not None else None
    if config.checkpoint.folder is None:
        return asked
    storage = LocalStorage(checkpoint_folder(config, Path()))
    held = _held(storage)
    if held is None or (asked is not None and _belongs_to(asked, held.owner)):
        return asked
    if asked is None and _is_continued(config, held, fresh=fresh):
        return _folder_of(held.owner)
    raise ConfigError(Problem("", "checkpoint.folder", _refusal(config, recipe, storage, held)))


def other_settings(config: Config, other: Config) -> list[str]:
    """Return what `other` says otherwise about what is trained, as `optim.lr: 0.1 then, 0.2 now`; not how long, where,
    or what is shown."""
    then, now = _what_is_trained(to_public(other)), _what_is_trained(to_public(config))
    flat_then, flat_now = dict(_flat(then)), dict(_flat(now))
    keys = dict.fromkeys([*flat_then, *flat_now])
    return [
        f"{key}: {flat_then.get(key)} then, {flat_now.get(key)} now"
        for key in keys
        if flat_then.get(key) != flat_now.get(key)
    ]


def _held(storage: Storage) -> _Held | None:
    """None: there is nothing that another run could lose."""
    if not names_by_step(storage.names()):
        return None
    owner, newest = storage.owner(), _newest(storage)
    if owner is None and newest is not None:  # an earlier version wrote no owner.json
        owner = Owner(newest.run, None, "a run")
    return _Held(owner, newest) if owner is not None else None


def _newest(storage: Storage) -> Manifest | None:
    for _, name in sorted(names_by_step(storage.names()).items(), reverse=True):
        try:
            return read_manifest(storage, name)
        except CorruptCheckpoint:
            continue
    return None


def _belongs_to(folder: Path, owner: Owner) -> bool:
    own = id_of_run(folder)
    if own is None:  # a run that was killed before it wrote its id, or one of an earlier version
        return owner.folder == str(folder) or (owner.folder is None and is_run(folder))
    return own == owner.run and not _is_copied(folder, owner)


def _is_copied(folder: Path, owner: Owner) -> bool:
    """Whether the run's folder of before is still there: this one is a copy of it then, and would not be alone."""
    if owner.folder is None or owner.folder == str(folder):
        return False
    return id_of_run(Path(owner.folder)) == owner.run


def _is_continued(config: Config, held: _Held, *, fresh: bool) -> bool:
    """Whether this is the command that began the other run, started again."""
    if held.newest is None:
        return False
    if _all_but_place(held.newest.config) != _all_but_place(finite(to_public(config))):
        return False
    return fresh or not _is_done(config, held)


def _is_done(config: Config, held: _Held) -> bool:
    assert held.newest is not None, "only a run that has a checkpoint is continued"
    folder = _folder_of(held.owner)
    if folder is not None:
        return is_finished(folder)
    progress = Progress(held.newest.step, held.newest.samples, held.newest.tokens)
    return is_at_its_end(config.run, progress, epoch_samples_in(held.newest))


def _folder_of(owner: Owner) -> Path | None:
    """The run's folder, if it is still there and the run's."""
    if owner.folder is None or id_of_run(Path(owner.folder)) != owner.run:
        return None
    return Path(owner.folder)


def _refusal(config: Config, recipe: str, storage: Storage, held: _Held) -> str:
    at = f", at step {held.newest.step:,}" if held.newest is not None else ""
    folder = _folder_of(held.owner)
    done = " (finished)" if folder is not None and is_finished(folder) else ""
    resume = f". To continue the other run: lockstep train {folder}" if folder is not None else ""
    return (
        f"{storage.place} holds the checkpoints of another run, {held.owner}{at}{done}; set checkpoint.folder: "
        f"{_free_subfolder(config, recipe)}, or leave it out: a run keeps its checkpoints in run.folder then{resume}"
    )


def _free_subfolder(config: Config, recipe: str) -> str:
    folder = str(config.checkpoint.folder).rstrip("/")
    name, number = Path(recipe).stem or "run", 1
    while True:
        free = f"{folder}/{name}" if number == 1 else f"{folder}/{name}-{number}"
        if not Path(free).exists():
            return free
        number += 1


def _all_but_place(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what may differ between two starts of one command."""
    kept = {name: section for name, section in config.items() if name not in _NOT_OF_THE_RUN}
    run = kept.get("run")
    kept_of_run = {key: value for key, value in run.items() if key != "folder"} if isinstance(run, Mapping) else {}
    return {**kept, "run": kept_of_run}


def _what_is_trained(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: section for name, section in _all_but_place(config).items() if name not in _CHANGES_NOTHING}
    return {**kept, "run": {key: value for key, value in kept["run"].items() if key not in LENGTHS}}


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(key, value)]
    return [pair for name, part in value.items() for pair in _flat(part, f"{key}.{name}" if key else name)]
