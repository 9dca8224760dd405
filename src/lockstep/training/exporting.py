"""Exports the model of a run from one of its checkpoints, in a format that other tools read.

RUN --> checkpoint: newest whose model verifies | --step N | --best --> its model's tensors, each byte verified
    --> safetensors    a file, with the model's own names
    --> torch          a state dict that torch.load(weights_only=True) reads, on request with the optimizer's state
    --> hf             a folder that from_pretrained reads; only for this the model is built
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.reading import Reader, ReadItem, read_manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import MANIFEST, names_by_step
from lockstep.config.loading import validate
from lockstep.config.schema import Config
from lockstep.config.trust import GIVEN, RunConfig, known_as
from lockstep.core.errors import ConfigError, Failure, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.progress import Progress
from lockstep.core.records import DataFacts
from lockstep.models.model_tensors import model_tensors
from lockstep.models.transformers_models import is_transformers_model
from lockstep.models.weight_files import Weights
from lockstep.models.weight_matching import match_weights
from lockstep.optim.groups import parameter_groups
from lockstep.plan.schedule import fraction_done, horizon, learning_rate
from lockstep.training.checkpoints import TRANSFORMS
from lockstep.training.ledger import segments_in
from lockstep.training.locations import CheckpointLocation, choose, find, readable_manifest
from lockstep.training.sources import facts_of_data, make_model
from lockstep.training.user_objects import UserObjects
from lockstep.training.weights import (
    FILE,
    save_for_transformers,
    save_tensors,
    tensors_of,
    to_rebuild,
    tokenizer_of,
    whole_file,
)

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Model

OPTIMIZER = "optimizer."
_RULES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
Form = Literal["safetensors", "torch", "hf"]
_MODEL, _EVALUATED = "model.", "evaluated."  # the latter of an optimizer with modes
_EXPORTS = "export"
_FORMS: Mapping[str, Form] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip


def _training_state(config: Config, manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the optimizer's state as torch has it, in the run's parameter groups, and the run's progress.

    Args:
        tensors: The model's, then the optimizer's (`optimizer.exp_avg.NAME`), whole.
    """
    optim, progress = config.optim, Progress(**manifest.state["progress"])
    order = segments_in(manifest.state["ledger"])[-1].order
    steps = horizon(config.run, config.batch.global_size, DataFacts(order.samples, None), config.data.drop_last)
    done = fraction_done(config.run, progress, order.epoch_samples)
    rate = learning_rate(optim, config.schedule, done, progress.steps, steps)
    trained = {key.split(".", 2)[2] for key in tensors if key.startswith(OPTIMIZER)}
    parameters = {
        name: nn.Parameter(tensor, requires_grad=name in trained)
        for name, tensor in tensors.items()
        if not name.startswith(OPTIMIZER) and tensor.is_floating_point()
    }
    groups = [
        {
            "params": [(name, parameters[name]) for name in group["names"]],
            "lr": rate * group["lr_scale"],
            "initial_lr": optim.lr * group["lr_scale"],
            "weight_decay": group["weight_decay"],
        }
        for group in parameter_groups(parameters.items(), optim)
    ]
    own: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
    if optim.name == "sgd":
        own = {"momentum": optim.momentum, "nesterov": optim.nesterov}
    rule: Any = _RULES[optim.name]
    optimizer: torch.optim.Optimizer = rule(groups, lr=optim.lr, **own)
    for key, tensor in tensors.items():
        if key.startswith(OPTIMIZER):
            _, entry, name = key.split(".", 2)
            optimizer.state[parameters[name]][entry] = tensor
    records = {"step": progress.steps, "samples": progress.samples, "epoch": progress.samples / order.epoch_samples}
    return {"optimizer_state_dict": optimizer.state_dict(), **records}


@dataclass(frozen=True, slots=True)
class ExportArguments:
    """The options of an export.

    Attributes:
        step: Step of the checkpoint; None: the newest that verifies, or the best if the run is to end with it.
        to: A folder, or a file whose suffix names the format; None: in the run's folder.
        format: `auto` is hf for a Hugging Face model, otherwise safetensors.
        optimizer: Whether to export optimizer state and progress, too.
        trust_remote_code: Whether code that comes with a downloaded model may run, for hf.
        trust_run: Whether code that the config of another user's run names may run, for hf.
    """

    step: int | None = None
    best: bool = False
    to: Path | None = None
    format: Literal["auto", "safetensors", "torch", "hf"] = "auto"
    optimizer: bool = False
    force: bool = False
    trust_remote_code: bool = False
    trust_run: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model: its checkpoint, the file (with `hf` the folder), and the numbers of tensors and elements.

    Attributes:
        broken: newer checkpoints that could not be used, and why.
        transforms: names of the run's transforms, which are not in the file.
    """

    checkpoint: str
    step: int
    form: Form
    target: Path
    tensors: int
    elements: int
    broken: Mapping[str, str]
    transforms: Sequence[str] = ()


def export(run: Path, arguments: ExportArguments) -> Exported:
    """Export a model, whole or not at all.

    Args:
        run: its folder, that of its checkpoints, or one of them.

    Raises:
        ConfigError: the arguments contradict each other or the run, the target exists, or code isn't trusted.
        RunFailed: no checkpoint can be read, or the disk is full.
    """
    location = find(run)
    step = _step(location, arguments)
    loaded = _config_of(location)
    config = loaded.config
    form = _form(config.model, arguments)
    if arguments.optimizer and form != "torch":
        raise ConfigError("--with optimizer needs --format torch")
    if arguments.optimizer and (config.optim.target is not None or config.optim.name not in _RULES):
        name = config.optim.target or config.optim.name
        raise ConfigError(f"--with optimizer is for optim.name {', '.join(_RULES)}; this run's is {name}: leave it out")
    if form == "hf":  # refused before anything large is read
        config = to_rebuild(loaded, trusted=arguments.trust_run)
    if arguments.to is not None:
        _refuse_to_overwrite(_target(None, form, "", arguments.to), form, force=arguments.force)
    model = _read_model(location.storage, step, optimizer=arguments.optimizer)
    target = _target(run if location.run == run.absolute() else location.run, form, model.name, arguments.to)
    _refuse_to_overwrite(target, form, force=arguments.force)
    try:
        _write(model, config, form, target, trust_remote_code=arguments.trust_remote_code)
    except Failure:
        raise
    except Exception as error:  # torch and safetensors have exceptions of their own for a full disk
        raise RunFailed(f"{target} could not be written: {_disk_error(error)}") from error
    return Exported(
        checkpoint=location.where(model.name),
        step=model.manifest.step,
        form=form,
        target=target,
        tensors=len(model.tensors),
        elements=sum(tensor.numel() for tensor in model.tensors.values()),
        broken=model.broken,
        transforms=_transforms(model.manifest),
    )


# --- the checkpoint -----------------------------------------------------------------------------------------------


def _step(location: CheckpointLocation, arguments: ExportArguments) -> int | None:
    """Return the checkpoint's step; None for the newest whose model verifies."""
    steps, step = names_by_step(location.storage.names()), arguments.step
    if not steps:
        raise ConfigError(f"{location.place} has no checkpoint")
    if location.name is not None:
        if arguments.best or step is not None:
            raise ConfigError(f"{location.name} is one checkpoint; --step and --best choose one of a run's")
        return next(step for step, name in steps.items() if name == location.name)
    if step is not None:
        choose(location, step)  # it is there
        return step
    config = _config_of(location).config
    if not arguments.best and config.run.end_with != "best":
        return None
    if config.checkpoint.best is None:
        raise ConfigError("--best: this run's config names no metric (checkpoint.best); give --step")
    best = Retention(location.storage, config.checkpoint, epoch_samples=1).best
    if best is None:
        raise ConfigError(f"no checkpoint in {location.place} has {config.checkpoint.best} in it; give --step")
    return best


def _config_of(location: CheckpointLocation) -> LoadedConfig:
    """Return the config of the run, or of the newest checkpoint that can be read."""
    if location.loaded is not None:
        return location.loaded
    names = names_by_step(location.storage.names())
    for step in sorted(names, reverse=True):
        if (manifest := readable_manifest(location.storage, names[step])) is not None:
            file = f"{location.where(names[step])}/{MANIFEST}"
            loaded = validate(manifest.config)
            run = RunConfig(file, Path(file).parent, known_as(manifest.run, manifest.config))
            return replace(loaded, origins=dict.fromkeys(loaded.origins, run.name), runs=(run,))
    raise _no_usable_checkpoint(location.storage, {})


@dataclass(frozen=True, slots=True)
class _SavedModel:
    """A checkpoint's model in memory, without the rest of the checkpoint.

    Attributes:
        tensors: by the model's own names, tied ones once.
        tied: other names of tied tensors, and the names that are saved.
        optimizer: the optimizer's tensors, if requested.
    """

    name: str
    manifest: Manifest
    tensors: dict[str, Tensor]
    tied: Mapping[str, str]
    optimizer: Mapping[str, Tensor]
    broken: Mapping[str, str]


def _read_model(storage: Storage, step: int | None, *, optimizer: bool) -> _SavedModel:
    names = names_by_step(storage.names())
    broken: dict[str, str] = {}
    for name in [names[known] for known in sorted(names, reverse=True) if step in (None, known)]:
        try:
            manifest = read_manifest(storage, name)
            tied = dict(manifest.state.get("sharding", {}).get("tied", {}))
            model = _read_tensors(storage, name, manifest, _MODEL)
            others = _read_tensors(storage, name, manifest, OPTIMIZER) if optimizer else {}
            tensors = {key.removeprefix(_MODEL): tensor for key, tensor in model.items()}
            if not optimizer:  # which goes with the weights that are trained
                evaluated = _read_tensors(storage, name, manifest, _EVALUATED)
                tensors |= {key.removeprefix(_EVALUATED): tensor for key, tensor in evaluated.items()}
            return _SavedModel(name, manifest, tensors, tied, others, broken)
        except CorruptCheckpoint as fault:
            broken[name] = str(fault)
    raise _no_usable_checkpoint(storage, broken)


def _no_usable_checkpoint(storage: Storage, broken: Mapping[str, str]) -> RunFailed:
    listed = "".join(f"\n  {name}: {why}" for name, why in broken.items())
    return RunFailed(f"{storage.place} has no checkpoint that can be used:{listed}", kind=FailureKind.DAMAGED)


def _read_tensors(storage: Storage, name: str, manifest: Manifest, prefix: str) -> dict[str, Tensor]:
    entries = {key: entry for key, entry in manifest.tensors.items() if key.startswith(prefix)}
    memory = {key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in entries.items()}
    items = (ReadItem(key, entry.info.whole, memory[key]) for key, entry in entries.items())
    Reader(storage, name, manifest).read(items)
    return memory


def _transforms(manifest: Manifest) -> list[str]:
    names = manifest.environment.get(TRANSFORMS)
    if isinstance(names, list):
        return [str(name) for name in names]
    targets = [section.get("target") for section in manifest.config.get("transforms") or ()]  # of a session
    return ["one that was passed in Python" if target == GIVEN else str(target) for target in targets]


# --- the file -----------------------------------------------------------------------------------------------------


def _form(model: Model, arguments: ExportArguments) -> Form:
    """Return the requested format; else that of the file's suffix; else the one that suits the model."""
    form, to = arguments.format, arguments.to
    suffix = to.suffix if to is not None and not to.is_dir() else ""
    named = _FORMS.get(suffix)
    if named is None and suffix[1:].isalpha():
        forms = ", ".join(f"*{known}" for known in _FORMS)
        raise ConfigError(f"--to {to}: unknown format; a file is one of {forms}, or a folder")
    if form == "auto":
        return named or ("hf" if model.kind == "huggingface" else "safetensors")
    if named is not None and named != form:
        raise ConfigError(f"--format {form} contradicts the file name {to}; leave one of them out")
    if form == "hf" and model.kind not in ("huggingface", "custom"):
        raise ConfigError(_not_of_transformers(f"a model of kind {model.kind}"))
    return form


def _target(run: Path | None, form: Form, name: str, to: Path | None) -> Path:
    if to is not None and to.suffix in _FORMS and not to.is_dir():
        return to
    if to is None and run is None:
        raise ConfigError(f"{name} is in no run's folder; give the target with --to")
    folder = to or cast("Path", run) / _EXPORTS / name
    if form == "hf":
        return folder
    return folder / (FILE if form == "safetensors" else "model.pt")


def _refuse_to_overwrite(target: Path, form: Form, *, force: bool) -> None:
    entries = list(target.iterdir()) if target.is_dir() else []
    if not target.exists() or (target.is_dir() and not entries):
        return
    if form == "hf" and not target.is_dir():
        raise ConfigError(f"{target} is a file, and --format hf writes a folder")
    if not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    is_model = (target / "config.json").is_file() and all(entry.is_file() for entry in entries)
    if target.is_dir() and not is_model:
        raise ConfigError(f"{target} holds more than a model: --force doesn't delete it; give another folder")


def _write(saved: _SavedModel, config: Config, form: Form, target: Path, *, trust_remote_code: bool) -> None:
    if form == "safetensors":
        save_tensors(saved.tensors, target)
    elif form == "torch":
        tied = {other: saved.tensors[name] for other, name in saved.tied.items()}
        content: dict[str, Any] = {**saved.tensors, **tied}
        if saved.optimizer:
            state = _training_state(config, saved.manifest, {**saved.tensors, **saved.optimizer})
            content = {"model_state_dict": content, **state}
        with whole_file(target) as new, new.open("wb") as file:
            torch.save(content, file)
    else:
        model = _build_model(saved, config, trust_remote_code)
        tokenizer = tokenizer_of(config.model, config.data.train)
        save_for_transformers(model, model_tensors(model), tensors_of(model), target, tokenizer)


def _disk_error(error: BaseException) -> str:
    """Return the disk's message: torch's writer raises another one when it is closed."""
    before = error.__context__
    while before is not None and not isinstance(error, OSError):
        error, before = before, before.__context__
    return str(error)


def _build_model(saved: _SavedModel, config: Config, trust_remote_code: bool) -> nn.Module:
    given = UserObjects(trust_remote_code=trust_remote_code)
    model: Any = make_model(config, facts_of_data(config, given), given)
    if not is_transformers_model(model):
        raise ConfigError(_not_of_transformers(f"a {type(model).__name__}"))
    fit = match_weights(model, Weights(Path(saved.name), saved.tensors))
    if not fit.whole:
        raise RunFailed(fit.mismatches().rstrip())
    fit.put(model)
    return cast("nn.Module", model)


def _not_of_transformers(kind: str) -> str:
    return f"--format hf is for models of the transformers library, and this is {kind}: --format safetensors or torch"
