"""Start a run from what another program saved: weights, optimizer state, and how far it was.

checkpoint + config  -->  RUN/config.yaml, RUN/checkpoints/step-N  -->  lockstep train RUN

The program's order of samples isn't known: the run continues at a place of its own order, and its ledger says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config, Parallel
from lockstep.config.trust import recorded
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.formatting import counted, listed
from lockstep.core.progress import Progress
from lockstep.core.records import TrainingState
from lockstep.core.terminal import command_line
from lockstep.interop.peer_optimizer import ENTRIES, PeerCheckpoint, PeerOptimizer, moments, named_optimizer
from lockstep.interop.peers import read_peer
from lockstep.loop.ledger import imported_ledger, order_of
from lockstep.loop.session import Session, components_of
from lockstep.models.weight_matching import WeightMatch, match_weights
from lockstep.monitor.environment import describe
from lockstep.monitor.folder import CONFIG, ENVIRONMENT, RunFolder, is_run
from lockstep.optim.groups import parameter_groups
from lockstep.plan.schedule import fraction_done, is_finished
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.locations import storage_of
from lockstep.resuming.resuming import Resume
from lockstep.training.job import opened


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """The result of an import; `steps` is None if the source has no optimizer state."""

    run: Path
    source: Path
    steps: int | None
    progress: Progress
    notes: tuple[str, ...]

    def __str__(self) -> str:
        train = command_line("lockstep", "train", self.run)
        what = "weights, without optimizer state"
        if self.steps is not None:
            what = f"weights and optimizer state, after {counted(self.steps, 'step')} of its optimizer"
        begins = f"step {self.progress.steps:,} and sample {self.progress.samples:,}"
        lines = [f"{self.run}: {what}, of {self.source}", *(f"  note: {note}" for note in self.notes)]
        return "\n".join([*lines, f"`{train}` continues from them, at {begins} of its own order and schedule"])


def import_run(
    source: Path,
    folder: Path,
    config: Config,
    recipe: str,
    step: int | None = None,
    sample: int | None = None,
    key: str | None = None,
    prefix: str = "",
    *,
    trust_remote_code: bool = False,
) -> ImportedRun:
    """Make a run's folder with a checkpoint that holds weights, optimizer state and progress.

    It begins at `step` and `sample`; None: where the checkpoint is.

    Raises:
        ConfigError: The source can't be read, or doesn't fit the config; or the folder isn't empty.
        RunFailed: The folder can't be written.
    """
    if is_run(folder) or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"{folder} isn't empty; give a new folder for the run")
    storage = storage_of(config.checkpoint, folder)
    if storage.names():
        raise ConfigError(Problem("", "checkpoint.folder", f"{storage.place} holds checkpoints; give another folder"))
    if config.optim.target is not None or config.optim.name not in ENTRIES:
        why = f"optimizer state can be imported for {', '.join(ENTRIES)}; leave out --config to import weights only"
        raise ConfigError(f"optim.name is {config.optim.target or config.optim.name}, but {why}")
    peer = read_peer(source, key, prefix, optimizer=True)
    single = config.model_copy(update={"parallel": Parallel(strategy="single")})
    with opened(single, UserObjects(trust_remote_code=trust_remote_code)) as session:
        notes = _load(session, peer, step, sample)
        _save(session, folder, config, recipe)
        steps = peer.optimizer.steps if peer.optimizer is not None else None
        return ImportedRun(folder, peer.weights.place, steps, session.progress, notes)


def _load(session: Session, peer: PeerCheckpoint, step: int | None, sample: int | None) -> tuple[str, ...]:
    components = components_of(session)
    model = components.sharding.state.model
    match = match_weights(model, peer.weights, translate=False)
    if not match.whole:
        raise ConfigError(match.mismatches().rstrip())
    match.put(model)
    progress = _progress(session, peer, step, sample)
    state = session.state()
    tensors = dict(state.tensors)
    differences: tuple[str, ...] = ()
    if peer.optimizer is not None:
        named = named_optimizer(peer.optimizer, model, *_names(peer, match, model), of_trainer=peer.of_trainer)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        tensors |= moments(named, components.config.optim, trained)
        differences = tuple(_differences(session, named, progress))
    ledger = imported_ledger(order_of(components), progress.samples)
    session.restore(TrainingState(tensors, {**state.values, "progress": asdict(progress), "ledger": ledger}))
    skipped = [f"not imported: {listed(peer.weights.skipped, 12)}"] if peer.weights.skipped else []
    steps = peer.optimizer.steps if peer.optimizer is not None else 0
    if steps and steps != progress.steps:
        begins = f"the run begins at step {progress.steps:,}; see --step"
        skipped.append(f"the optimizer has made {steps:,} steps, but {begins}")
    return (*differences, *skipped)


def _names(peer: PeerCheckpoint, match: WeightMatch, model: nn.Module) -> tuple[Sequence[str], Mapping[str, str]]:
    slots = {id(tensor): slot.name for slot, tensor in match.pairs}
    renamed = {name: slots[id(tensor)] for name, tensor in peer.weights.tensors.items() if id(tensor) in slots}
    own = [name for name, _ in model.named_parameters()]
    if not peer.in_order:
        return own, renamed
    parameters = set(own)
    return [name for name in dict.fromkeys(renamed.values()) if name in parameters], renamed


def _progress(session: Session, peer: PeerCheckpoint, steps: int | None, samples: int | None) -> Progress:
    components = components_of(session)
    run, plan = components.config.run, components.plan
    samples = peer.samples if samples is None and steps is None else samples
    if steps is None:
        steps = peer.step if peer.step is not None else peer.optimizer.steps if peer.optimizer is not None else 0
    if samples is None:
        epochs, rest = divmod(steps, plan.epoch_steps)
        samples = epochs * plan.epoch_samples + rest * components.config.batch.global_size
    progress = Progress(steps, samples)
    if run.tokens is not None and steps:
        raise ConfigError("run.tokens: the checkpoint doesn't record tokens; set run.steps, run.samples or run.epochs")
    if is_finished(run, progress, plan.epoch_samples):
        at = f"{peer.weights.place} is at step {steps:,} and sample {samples:,}"
        raise ConfigError(f"{at}, after the end of the config's run; set a longer run, or --step 0 to start over")
    return progress


def _differences(session: Session, named: PeerOptimizer, progress: Progress) -> Iterator[str]:
    components = components_of(session)
    optim, plan, model = components.config.optim, components.plan, components.sharding.state.model
    done = fraction_done(components.config.run, progress, plan.epoch_samples)
    rate = components.update.rate(done, progress.steps, plan.steps)
    saved = {name: values for group, values in zip(named.groups, named.settings, strict=False) for name in group}
    differing: dict[tuple[str, str, str], list[str]] = {}
    for group in parameter_groups(model.named_parameters(), optim):
        own: dict[str, Any] = {"lr": rate * group["lr_scale"], "weight_decay": group["weight_decay"], "maximize": False}
        if optim.name == "sgd":
            own |= {"momentum": optim.momentum, "nesterov": optim.nesterov, "dampening": 0.0}
        else:
            own |= {"betas": optim.betas, "eps": optim.eps}
            own |= {"decoupled_weight_decay": optim.name == "adamw"} if group["weight_decay"] else {}
        for name, (key, value) in product(group["names"], own.items()):
            other = _shown(saved.get(name, {}).get(key, value))
            if other != _shown(value):
                differing.setdefault((key, other, _shown(value)), []).append(name)
    for (key, other, value), names in differing.items():
        who = f"for {counted(len(names), 'parameter')} ({listed(names, 4)})"
        remedy = _REMEDIES.get(key, f"set optim.{key}: {other}")
        yield f"{key} is {other} in the checkpoint, {value} in the config, {who}; {remedy}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    return json.dumps(value) if isinstance(value, bool) else f"{value:.6g}"


_REMEDIES = {
    "lr": "set optim.lr to the peak, and the schedule that it had",
    "decoupled_weight_decay": "set optim.name: adamw if it is true, else adam",
    "weight_decay": "set optim.weight_decay, with optim.decay: all or matrices, or optim.rules",
    **dict.fromkeys(("dampening", "maximize"), "the next updates differ: no key sets it"),
}


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
        run_folder.write(CONFIG, recorded(config, checkpoints.run))
        run_folder.write(ENVIRONMENT, {**environment, "run": checkpoints.run})
    finally:
        run_folder.release()
        run_folder.remove_unstarted()
