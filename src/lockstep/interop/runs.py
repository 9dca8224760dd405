"""What DeepSpeed alone has saved, made the beginning of a run: weights, Adam's moments, and the steps it has made.

FOLDER of DeepSpeed's + config  -->  RUN/config.yaml, RUN/checkpoints/step-00000000  -->  lockstep train RUN

DeepSpeed doesn't say which samples it has had, nor how far a schedule was: the run begins with its first sample and at
the beginning of its schedule, and that is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.config.known_runs import recorded
from lockstep.config.schema import Config, Parallel
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import TrainingState
from lockstep.interop.zero_files import ZeroCheckpoint, read_zero
from lockstep.models.weight_files import Weights
from lockstep.models.weight_matching import match_weights
from lockstep.monitor.environment import describe
from lockstep.monitor.folder import RunFolder, is_run
from lockstep.training.checkpoints import Checkpoints, Resume
from lockstep.training.job import opened
from lockstep.training.locations import storage_of
from lockstep.training.session import components_of
from lockstep.training.user_objects import UserObjects

if TYPE_CHECKING:
    from lockstep.training.locations import storage_of
from lockstep.training.session import Session

_ADAMS = ("adamw", "adam")


@dataclass(frozen=True, slots=True)
class Begun:
    """Attributes:
    run: its folder.
    of: the folder that was read.
    steps: that the optimizer has made.
    """

    run: Path
    of: Path
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.run}: weights and moments of {self.of}, after {self.steps:,} steps of its optimizer\n"
            f"`lockstep train {self.run}` goes on with them, at the first sample and the beginning of the schedule"
        )


def import_run(source: Path, folder: Path, config: Config, recipe: str, *, trust_remote_code: bool = False) -> Begun:
    """Raises:
    ConfigError: it can't be read, isn't Adam's, doesn't fit the config's model; or something is in the folder.
    RunFailed: the folder can't be written.
    """
    if is_run(folder) or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"{folder} isn't empty; give a new folder for the run")
    storage = storage_of(config, folder)
    if storage.names():
        raise ConfigError(Problem("", "checkpoint.folder", f"{storage.place} holds checkpoints; give another folder"))
    if config.optim.name not in _ADAMS:
        raise ConfigError(f"optim.name is {config.optim.name}: moments are taken for {' and '.join(_ADAMS)}")
    found = read_zero(source.expanduser(), moments=True)
    alone = config.model_copy(update={"parallel": Parallel(strategy="single")})
    with opened(alone, UserObjects(trust_remote_code=trust_remote_code)) as session:
        _put(session, found)
        _save(session, folder, config, recipe)
    return Begun(folder, found.place, found.steps)


def _put(session: Session, found: ZeroCheckpoint) -> None:
    bare = components_of(session).sharding.state.model
    fit = match_weights(bare, Weights(found.place, found.tensors), translate=False)
    if not fit.whole:
        raise ConfigError(fit.mismatches().rstrip())
    fit.put()
    state = session.state()
    slots = {id(tensor): slot.name for slot, tensor in fit.pairs}
    names = {name: slots[id(tensor)] for name, tensor in found.tensors.items() if id(tensor) in slots}
    trained = {name for name, one in bare.named_parameters() if one.requires_grad}
    moments = {
        entry: {names.get(name, name): tensor for name, tensor in of.items()} for entry, of in found.moments.items()
    }
    for entry, of in moments.items():
        if set(of) != trained:
            odd = sorted(set(of) ^ trained)[0]
            has = "trains" if odd in trained else "doesn't train"
            raise ConfigError(
                f"the config's model {has} {odd}, and {found.place} {'has' if odd in of else 'has no'} {entry} of it"
            )
    tensors = dict(state.tensors)
    tensors |= {f"optimizer.{entry}.{name}": tensor for entry, of in moments.items() for name, tensor in of.items()}
    tensors |= {f"optimizer.step.{name}": torch.tensor(float(found.steps)) for name in trained}
    session.restore(TrainingState(tensors, state.values))


def _save(session: Session, folder: Path, config: Config, recipe: str) -> None:
    environment = {"recipe": recipe, **describe()}
    place = RunFolder.create(folder, recipe)
    try:
        checkpoints = Checkpoints(session, storage_of(config, folder), environment, folder.absolute(), recipe)
        checkpoints.begin(Resume())
        checkpoints.save()
        for report in checkpoints.finish():
            if report.failure is not None:
                raise RunFailed(f"{folder}: the checkpoint could not be written: {report.failure}")
        place.write_config(recorded(config, checkpoints.run))
        place.write_environment({**environment, "run": checkpoints.run})
    finally:
        place.release()
        place.remove_unstarted()
