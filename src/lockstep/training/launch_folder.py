"""The folder of a run that an elastic launcher restarts and whose config names none.

    the launcher's store has it             that folder: the ranks have been started again
    the launch has an id (--rdzv-id 4711,   runs/RECIPE-4711, so that a job that is queued again finds it; if that run
    or --job-id 4711)                       is finished, or has other settings, RECIPE-4711-2, -3, ...
    neither                                 a new folder, RECIPE-DATE-TIME

torchrun's id is "none" unless one is given: all launches share it, so it is not an id. On a single node torchrun makes
up a UUID, which no other launch will have. In both cases a restart finds the folder by the store, which the launcher
keeps as long as it lives, on whichever node rank 0 is. Without a store (torchrun keeps none under
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) it is the launch's id, or the config, by which a restart finds the folder; a
restart can't be told from a start there, so what starts over is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Failure
from lockstep.core.ranks import RankEnvironment, names_a_rank, started_by_lockstep
from lockstep.monitor.folder import CONFIG, is_finished
from lockstep.training.resuming import Resume

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.distributed.process_group import World

_FOLDER, _BEGUN = "run-folder", "run-begun"  # keys in the launcher's store
_NO_ID = ("", "none")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LONGEST_ID = 64


def kept_folder(world: World) -> Path | None:
    """Return the folder that earlier ranks of this launch have used, as far as it is known. All ranks together."""
    store = world.launcher_store
    return Path(store.get(_FOLDER).decode()) if store is not None and store.check([_FOLDER]) else None


def keep_folder(world: World, folder: Path) -> None:
    """Record the folder for ranks that the launcher starts after these."""
    if world.rank == 0 and world.launcher_store is not None:
        world.launcher_store.set(_FOLDER, str(folder))


def folder_of_launch(config: Config, recipe: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for the id of an elastic launch; None: it has none."""
    launch = config.launch.job_id or (_elastic_id(RankEnvironment.read(environ)) if names_a_rank(environ) else "")
    if launch in _NO_ID:
        return None
    name = f"{Path(recipe).stem or 'run'}-{_file_name(launch)}"
    for number in itertools.count(1):
        folder = Path("runs", name if number == 1 else f"{name}-{number}").absolute()
        if not folder.exists() or _continues(config, folder):
            return folder
    raise AssertionError("there is always a free number")


def _elastic_id(environment: RankEnvironment) -> str:
    made_up = environment.agent_store and _UUID.fullmatch(environment.launch_id)
    return "" if made_up else environment.launch_id


def mark_begun(world: World, folder: Path) -> None:
    """Record that the run has begun: ranks that the launcher starts after these resume it, whatever began it."""
    if world.rank == 0 and world.launcher_store is not None:
        world.launcher_store.set(_BEGUN, "")


def has_begun(world: World) -> bool:
    """Return whether the launcher starts the ranks of this run again."""
    return world.launcher_store is not None and world.launcher_store.check([_BEGUN])


def resumed(resume: Resume, world: World) -> Resume:
    """Return how a run begins: as the command has it, or, after a restart, from its newest checkpoint."""
    store, starts = world.launcher_store, resume.fresh or resume.step is not None or resume.origin is not None
    if starts and store is None and "TORCHELASTIC_RUN_ID" in os.environ and not started_by_lockstep(os.environ):
        raise ConfigError(
            "--fresh, --from and --fork would start over at each restart: this launcher has no store that outlives its "
            "ranks; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or begin the run once without torchrun"
        )
    return replace(resume, fresh=False, step=None, origin=None) if has_begun(world) else resume


def is_first_start() -> bool:
    """Return whether no elastic launcher has started this rank again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _continues(config: Config, folder: Path) -> bool:
    """Return whether a folder has this run, not finished."""
    from lockstep.training.finished_run import run_config  # these two import this module, or what does
    from lockstep.training.ownership import other_settings

    if is_finished(folder):
        return False
    try:
        return not (folder / CONFIG).is_file() or not other_settings(config, run_config(folder))
    except Failure:  # its config can't be read
        return False


def _file_name(launch: str) -> str:
    """Return the id as a part of a file name; ids that differ have names that differ."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", launch)[:_LONGEST_ID]
    return plain if plain == launch else f"{plain}-{hashlib.sha1(launch.encode()).hexdigest()[:8]}"
