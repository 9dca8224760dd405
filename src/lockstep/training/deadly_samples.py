"""The training samples whose reading has ended a process of the run: the same on all ranks, and noted at the start.

logs/deadly_samples.jsonl --> rank 0 --> all ranks: what to leave out, and what to read alone
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.data.bad_samples import NONE_DEADLY, Deadly
from lockstep.launch.deadly_samples import DeadlySamples
from lockstep.launch.deaths import FILE
from lockstep.monitor.folder import LOGS
from lockstep.training.launch_folder import begun_folder

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.distributed.process_group import World
    from lockstep.training.job import Job


def known_deadly(config: Config, job: Job | None, world: World) -> Deadly:
    """Return the samples whose reading has ended a process of the run, if it leaves bad ones out; on all ranks."""
    if job is None or not config.data.bad_samples.skips:
        return NONE_DEADLY
    folder = begun_folder(config, job, world) if world.rank == 0 else None
    known = NONE_DEADLY if folder is None else DeadlySamples.of(config, folder / LOGS).known()
    return cast("Deadly", world.axis.broadcast(known))


def notes_on_deadly(run: Path, config: Config) -> list[str]:
    """Return a note on each sample that the run leaves out because of it."""
    if not config.data.bad_samples.skips:
        return []
    deadly = DeadlySamples.of(config, run / LOGS).known().reasons
    again = f"delete {LOGS}/{FILE} in the run's folder to read it again"
    return [f"sample {index} of data.train is left out: {reason} ({again})" for index, reason in deadly.items()]
