"""The training samples whose reading has ended a process of the run: the same on all ranks, and noted at the start.

logs/deadly_samples.jsonl --> rank 0 --> all ranks: what to leave out, and what to read alone

Lockstep's launcher forgets them where a run starts over; under other launchers, and without one, the first rank does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core.errors import WorkerDied
from lockstep.data.bad_samples import NONE_DEADLY, Deadly
from lockstep.launch.deadly_samples import DeadlySamples
from lockstep.launch.deaths import FILE
from lockstep.monitor.folder import LOGS
from lockstep.training.launch_folder import begun_folder, resumed, starts_over

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.distributed.process_group import World
    from lockstep.training.job import Job
    from lockstep.training.resuming import Resume


def known_deadly(config: Config, job: Job | None, world: World) -> Deadly:
    """Return the samples whose reading has ended a process of the run, if it leaves bad ones out; on all ranks."""
    if job is None or not config.data.bad_samples.skips:
        return NONE_DEADLY
    known, folder = NONE_DEADLY, begun_folder(config, job, world)
    if not starts_over(resumed(job.resume, world, folder)) and world.rank == 0 and folder is not None:
        known = DeadlySamples.of(config, folder / LOGS).known()
    return cast("Deadly", world.axis.broadcast(known))


def forget_others(config: Config, resume: Resume, folder: Path) -> None:
    """Forget the samples of an earlier run in the folder, if this one starts over there."""
    if starts_over(resume):
        DeadlySamples.of(config, folder / LOGS).forget()


def remember_death(error: Exception, config: Config, folder: Path) -> None:
    """Record which samples a data worker was reading that has died, and ends this rank."""
    if isinstance(error, WorkerDied) and error.samples:
        DeadlySamples.of(config, folder / LOGS).add(error.samples, str(error), error.evaluation_set)


def notes_on_deadly(run: Path, config: Config) -> list[str]:
    """Return a note on each sample that the run leaves out because of it."""
    if not config.data.bad_samples.skips:
        return []
    deadly = DeadlySamples.of(config, run / LOGS).known().reasons
    again = f"delete {LOGS}/{FILE} in the run's folder to read it again"
    return [f"sample {index} of data.train is left out: {reason} ({again})" for index, reason in deadly.items()]
