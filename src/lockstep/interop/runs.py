"""Start a run from what DeepSpeed saved: weights, Adam's moments, and the number of optimizer steps.

DeepSpeed's FOLDER + config  -->  RUN/config.yaml, RUN/checkpoints/step-00000000  -->  lockstep train RUN

DeepSpeed doesn't record which samples were used, nor the position in a schedule: the run starts with the first sample
and at the beginning of its schedule, and the output states it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.config.schema import Config, Parallel
from lockstep.config.trust import recorded
from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import TrainingState
from lockstep.interop.zero_checkpoint import ZeroCheckpoint, read_zero
from lockstep.models.weight_files import Weights
from lockstep.models.weight_matching import match_weights
from lockstep.monitor.environment import describe
from lockstep.monitor.folder import RunFolder, is_run
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.job import opened
from lockstep.training.locations import storage_of
from lockstep.training.resuming import Resume
from lockstep.training.session import components_of
from lockstep.training.user_objects import UserObjects

if TYPE_CHECKING:
    from lockstep.training.session import Session

_OPTIMIZERS = ("adamw", "adam")


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """The result of an import.

    Attributes:
        run: The run's folder.
        source: The folder that was read.
        steps: Steps of the optimizer so far.
    """

    run: Path
    source: Path
    steps: int

    def __str__(self) -> str:
        train = command_line("lockstep", "train", self.run)
        return (
            f"{self.run}: weights and moments of {self.source}, after {self.steps:,} steps of its optimizer\n"
            f"`{train}` continues from them, at the first sample and the beginning of the schedule"
        )


def import_run(
    source: Path, folder: Path, config: Config, recipe: str, *, trust_remote_code: bool = False
) -> ImportedRun:
    """Make a run's folder with a checkpoint of step 0 that holds the weights and moments.

    Raises:
        ConfigError: The source can't be read, isn't Adam's or doesn't fit the config's model; or the folder isn't
            empty.
        RunFailed: The folder can't be written.
    """
    if is_run(folder) or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"{folder} isn't empty; give a new folder for the run")
    storage = storage_of(config.checkpoint, folder)
    if storage.names():
        raise ConfigError(Problem("", "checkpoint.folder", f"{storage.place} holds checkpoints; give another folder"))
    if config.optim.name not in _OPTIMIZERS:
        raise ConfigError(f"optim.name is {config.optim.name}; moments can be imported for {' and '.join(_OPTIMIZERS)}")
    checkpoint = read_zero(source.expanduser(), moments=True)
    single = config.model_copy(update={"parallel": Parallel(strategy="single")})
    with opened(single, UserObjects(trust_remote_code=trust_remote_code)) as session:
        _load(session, checkpoint)
        _save(session, folder, config, recipe)
    return ImportedRun(folder, checkpoint.place, checkpoint.steps)


def _load(session: Session, checkpoint: ZeroCheckpoint) -> None:
    model = components_of(session).sharding.state.model
    match = match_weights(model, Weights(checkpoint.place, checkpoint.tensors), translate=False)
    if not match.whole:
        raise ConfigError(match.mismatches().rstrip())
    match.put(model)
    state = session.state()
    slots = {id(tensor): slot.name for slot, tensor in match.pairs}
    names = {name: slots[id(tensor)] for name, tensor in checkpoint.tensors.items() if id(tensor) in slots}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = dict(state.tensors)
    for entry, moments in checkpoint.moments.items():
        renamed = {names.get(name, name): tensor for name, tensor in moments.items()}
        for name in sorted(renamed.keys() ^ trained):
            trains = "trains" if name in trained else "doesn't train"
            has = "has" if name in renamed else "has no"
            raise ConfigError(f"the config's model {trains} {name}, but {checkpoint.place} {has} {entry} of it")
        tensors |= {f"optimizer.{entry}.{name}": tensor for name, tensor in renamed.items()}
    tensors |= {f"optimizer.step.{name}": torch.tensor(float(checkpoint.steps)) for name in trained}
    session.restore(TrainingState(tensors, state.values))


def _save(session: Session, folder: Path, config: Config, recipe: str) -> None:
    environment = {"recipe": recipe, **describe(config.launch.environment)}
    run_folder = RunFolder.create(folder, recipe)
    try:
        storage = storage_of(config.checkpoint, folder)
        checkpoints = Checkpoints(session, storage, environment, folder.absolute(), recipe)
        checkpoints.begin(Resume())
        checkpoints.save()
        for report in checkpoints.finish():
            if report.failure is not None:
                raise RunFailed(f"{folder}: the checkpoint could not be written: {report.failure}")
        run_folder.write_config(recorded(config, checkpoints.run))
        run_folder.write_environment({**environment, "run": checkpoints.run})
    finally:
        run_folder.release()
        run_folder.remove_unstarted()
