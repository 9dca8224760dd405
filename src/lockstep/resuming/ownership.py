"""The folder of a run, and the check that the checkpoints in `checkpoint.folder` belong to it.

no checkpoints                              --> this run takes the folder
this run's (its id, or its folder)          --> the run resumes
another run's: trains alike, not finished   --> the same command was started again: it resumes in that run's folder
another run's                               --> refused, with a free subfolder

Checkpoints in the run's own folder need no check. An object store is checked by the ranks: a client that the launcher
has used can't be forked with them.

A run without a folder in its config gets one per launch, which a restart finds again: in the launcher's store, by the
launch's id (--rdzv-id 4711 or --job-id 4711: runs/RECIPE-4711), or else a new one, RECIPE-DATE-TIME. torchrun's id is
"none" unless one is given, and on a single node a UUID. Without a store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) a
restart can't be told from a start, so --fresh, --from and --fork are refused there.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.storage import Owner, names_by_step
from lockstep.config.known_runs import CONFIG, id_of_run
from lockstep.config.writing import to_public
from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.formatting import differing
from lockstep.core.hub import requested
from lockstep.core.processes import in_fork, may_fork
from lockstep.core.progress import Progress
from lockstep.core.ranks import RankEnvironment, names_a_rank, started_by_lockstep
from lockstep.core.terminal import command_line
from lockstep.distributed.collectives import from_first_rank
from lockstep.loop.session import Session, components_of
from lockstep.monitor.folder import is_finished, is_run
from lockstep.monitor.jsonl import finite
from lockstep.plan.schedule import LENGTHS
from lockstep.plan.schedule import is_finished as is_at_its_end
from lockstep.resuming.locations import checkpoint_folder, reachable, readable_manifest, run_config, storage_of
from lockstep.resuming.resuming import Resume, epoch_samples_in
from lockstep.stores.addresses import is_address
from lockstep.stores.buckets import RETRY_SECONDS

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.schema import Checkpoint, Config
    from lockstep.distributed.process_group import World

FOLDER, BEGUN = "run-folder", "run-begun"
"""Keys in the launcher's store."""
_NO_ID = ("", "none")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NOT_OF_THE_TRAINING = (
    "description", "launch", "monitor", "checkpoint", "evaluation", "parallel", "memory",
)  # fmt: skip
"""Sections that don't affect the trained weights."""
_MAY_DIFFER = {"batch": ("micro_size",), "run": ("folder", *LENGTHS)}
_OF_OPTIMIZER = ("optim.lr", "optim.weight_decay")  # settings that a custom optimizer may have by itself


# --- the folder of a launch ---------------------------------------------------------------------------------------


def kept(world: World, key: str) -> str | None:
    """Return what earlier ranks of this launch have kept, such as the run's `FOLDER`. All ranks together."""
    store = world.launcher_store
    return store.get(key).decode() if store is not None and store.check([key]) else None


def keep(world: World, key: str, value: str = "") -> None:
    """Keep a value for ranks that the launcher starts after these: they resume a run that has `BEGUN`."""
    if world.rank == 0 and world.launcher_store is not None:
        world.launcher_store.set(key, value)


def folder_of_launch(config: Config, recipe: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for the id of a launch; None: it has none."""
    launch = config.launch.job_id or ""
    if not launch and names_a_rank(environ):
        environment = RankEnvironment.read(environ)
        is_made_up = environment.agent_store and _UUID.fullmatch(environment.launch_id)
        launch = "" if is_made_up else environment.launch_id
    if launch in _NO_ID:
        return None
    return Path("runs", f"{Path(recipe).stem or 'run'}-{re.sub(r'[^A-Za-z0-9._-]', '-', launch)}").absolute()


def resumed(resume: Resume, world: World) -> Resume:
    """Return how a run begins: as the command says, or, after a restart, from its newest checkpoint."""
    store, starts = world.launcher_store, resume.fresh or resume.step is not None or resume.origin is not None
    if starts and store is None and "TORCHELASTIC_RUN_ID" in os.environ and not started_by_lockstep(os.environ):
        raise ConfigError(
            "--fresh, --from and --fork would start over at each restart: this launcher has no store that outlives its "
            "ranks; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or begin the run once without torchrun"
        )
    return replace(resume, fresh=False, step=None, origin=None) if kept(world, BEGUN) is not None else resume


# --- the owner of checkpoints -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Occupant:
    """The run that owns the checkpoints of a folder, and the manifest of the newest readable one, if any."""

    owner: Owner
    newest: Manifest | None

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it still exists and is still that run's."""
        if self.owner.folder is None or id_of_run(Path(self.owner.folder)) != self.owner.run:
            return None
        return Path(self.owner.folder)


def run_folder_for(config: Config, recipe: str, resume: Resume) -> Path | None:
    """Return the folder of the config, of the launch, or of the run that this config continues; None: a new one.

    Raises:
        ConfigError: checkpoint.folder belongs to another run, or a fork would overwrite another run's files.
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
    subfolder = f"{config.checkpoint.folder.rstrip('/')}/{Path(recipe).stem or 'run'}"
    remedy = f"set checkpoint.folder: {subfolder}, or leave it out: a run keeps its checkpoints in run.folder then"
    raise ConfigError(Problem("", "checkpoint.folder", _refusal(storage.place, occupant, remedy)))


def _probe(checkpoint: Checkpoint) -> None:
    """Write to a bucket and delete it again, in a child process: the client has threads. Raises ConfigError."""
    seconds = min(checkpoint.retry_seconds, RETRY_SECONDS)

    def tried() -> str:
        try:
            storage = storage_of(checkpoint.model_copy(update={"retry_seconds": seconds}), Path())
            with reachable(storage), storage.try_lock(uuid.uuid4().hex):
                storage.names()
        except ConfigError as error:
            return str(error)
        return ""

    if why := in_fork(tried) if may_fork() else tried():
        raise ConfigError(Problem("", "checkpoint.folder", why))


def refusal_of_storage(config: Config, storage: Storage, folder: Path | None, resume: Resume) -> str | None:
    """Return why a run may not keep its checkpoints in a storage: it has another run's. None: it may.

    `folder` is the run's; None: a session, which continues what an earlier session has saved.
    """
    occupant = _occupant(storage)
    if occupant is None or (config.run.folder is None and _is_continued(config, occupant, fresh=resume.fresh)):
        return None
    if folder is not None:
        remedy = "give each run a storage of its own, such as another bucket, prefix or file"
        return None if _belongs_to(folder, occupant.owner) else _refusal(storage.place, occupant, remedy)
    if resume.accept_changes or occupant.owner.folder is None or _trains_alike(config, occupant.newest):
        return None
    remedy = "give the session a place of its own; accept_changes=True continues from these"
    return _refusal(storage.place, occupant, remedy)


def other_settings(config: Config, earlier: Config) -> list[str]:
    """Return the settings that affect what is learned and differ, as `optim.lr: 0.1 then, 0.2 now`; without lengths."""
    differences = differing(*(_of_training(to_public(settings)) for settings in (earlier, config)))
    if config.optim.name == "given":  # the optimizer's own values are recorded where the config has none
        for key in _OF_OPTIMIZER:
            if key.removeprefix("optim.") not in config.optim.model_fields_set:
                differences.pop(key, None)
    return [f"{key}: {then} then, {now} now" for key, (then, now) in differences.items()]


def _refuse_taken_fork(checkpoint: Checkpoint, folder: Path) -> None:
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
    why = ""
    if (folder / CONFIG).is_file():
        with suppress(Failure, OSError):  # a config that can't be read, a place that is gone: the ranks report it
            then = run_config(folder).checkpoint
            if then.folder != checkpoint.folder and then.storage is None and checkpoint.storage is None:
                before, now = storage_of(then, folder), storage_of(checkpoint, folder)
                steps, owner = names_by_step(before.names()), before.owner()
                is_own = owner is None or owner.run == id_of_run(folder)
                if steps and is_own and not names_by_step(now.names()):
                    why = (
                        f"{now.place} has no checkpoints, and the run in {folder} has its own in {before.place}, the "
                        f"newest of step {max(steps):,}; copy them there to resume, leave the key out, or start over: "
                        "--fresh"
                    )
    if why:
        raise ConfigError(Problem("", "checkpoint.folder", why))


def _occupant(storage: Storage) -> _Occupant | None:
    """Return the run that owns the checkpoints in the storage; None if another run could overwrite nothing there."""
    names = names_by_step(storage.names())
    if not names:
        return None
    manifests = (readable_manifest(storage, names[step]) for step in sorted(names, reverse=True))
    owner, newest = storage.owner(), next(filter(None, manifests), None)
    if owner is None and newest is not None:  # checkpoints that were copied without their owner.json
        owner = Owner(newest.run, None, "a run")
    return _Occupant(owner, newest) if owner is not None else None


def _trains_alike(config: Config, newest: Manifest | None) -> bool:
    return newest is not None and _of_training(newest.config) == _of_training(finite(to_public(config)))


def _belongs_to(folder: Path, owner: Owner) -> bool:
    run = id_of_run(folder)
    if run is None:  # killed before it wrote its id
        return owner.folder == str(folder)
    is_copy = owner.folder not in (None, str(folder)) and id_of_run(Path(str(owner.folder))) == owner.run
    return run == owner.run and not is_copy


def _is_continued(config: Config, occupant: _Occupant, *, fresh: bool) -> bool:
    """Return whether this command started the other run, and that run isn't finished or starts over."""
    newest, folder = occupant.newest, occupant.folder
    if newest is None or not _trains_alike(config, newest):
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


def _of_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the settings that affect the trained weights, without lengths and micro-batches."""
    kept = {name: section for name, section in config.items() if name not in _NOT_OF_THE_TRAINING}
    for name, keys in _MAY_DIFFER.items():
        if isinstance(section := kept.get(name), Mapping):
            kept[name] = {key: value for key, value in section.items() if key not in keys}
    # the commit that a run has begun with is no setting
    data = kept.get("data")
    if isinstance(model := kept.get("model"), Mapping):
        kept["model"] = {**model, "revision": requested(model.get("revision"))}
    if isinstance(data, Mapping) and isinstance(train := data.get("train"), Mapping):
        kept["data"] = {**data, "train": {**train, "revision": requested(train.get("revision"))}}
    return kept


def refuse_other_run(session: Session, storage: Storage, home: Path | None, resume: Resume) -> None:
    """Raise ConfigError if the storage has another run's checkpoints; `home` is the run's folder, None: a session."""
    config, axis = components_of(session).config, components_of(session).world.axis
    if home is not None and isinstance(storage, LocalStorage):
        return
    refusal = from_first_rank(axis, partial(refusal_of_storage, config, storage, home, resume))
    if refusal is not None:
        key = "checkpoint.storage" if config.checkpoint.storage is not None else "checkpoint.folder"
        raise ConfigError(Problem("", "" if home is None else key, refusal))
