"""Exports the model of a run from one of its checkpoints, in a format that other tools read.

RUN --> checkpoint: newest verified model | --step N | --best --> its model's tensors, each byte verified
    --> safetensors    a file, with the model's own names
    --> torch          a state dict that torch.load(weights_only=True) reads
    --> hf             a folder that from_pretrained reads; only this builds the model
    --> dcp            a folder of torch.distributed.checkpoint
                       torch, hf and dcp may have the optimizer's state, too (`ExportedState`)
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from lockstep.assembly.adapters import PLAIN, adapter_in, merged
from lockstep.assembly.sources import facts_of_data, make_model
from lockstep.assembly.user_objects import UserObjects
from lockstep.assembly.weights import (
    FILE,
    add_tokenizer,
    save_adapter,
    save_for_transformers,
    save_tensors,
    tensors_of,
    to_rebuild,
    tokenizer_of,
)
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.reading import Reader, read_manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import MANIFEST, names_by_step
from lockstep.config.known_runs import RunConfig, known_as
from lockstep.config.loading import validate
from lockstep.config.schema import GIVEN, Config, Model
from lockstep.core import checksums
from lockstep.core.adapters import ADAPTER_CONFIG, Adapter
from lockstep.core.errors import ConfigError, Failure, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.files import replacing_file, replacing_folder
from lockstep.core.progress import Progress
from lockstep.core.records import DataFacts
from lockstep.loop.ledger import segments_in
from lockstep.models.model_tensors import model_tensors
from lockstep.models.transformers_models import is_transformers_model, trainer_decays
from lockstep.models.weight_files import Weights
from lockstep.models.weight_matching import match_weights
from lockstep.optim.groups import parameter_groups
from lockstep.plan.schedule import fraction_done, horizon, learning_rate
from lockstep.resuming.checkpoints import TRANSFORMS
from lockstep.resuming.locations import CheckpointLocation, choose, find
from lockstep.training.model_card import HubTarget, card_for

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.loading import LoadedConfig

OPTIMIZER = "optimizer."
_RULES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
Form = Literal["safetensors", "torch", "hf", "dcp", "peft"]
_MODEL = "model."
_EVALUATED = "evaluated.", "optimizer.averaged_weight."  # of an optimizer with modes, or with an average
_EXPORTS = "export"
_FOLDERS = ("hf", "dcp", "peft")
_FORMS: Mapping[str, Form] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip


def refuse_other_optimizers(config: Config) -> None:
    """Raise ConfigError if torch has no optimizer that continues with the state."""
    if config.optim.target is not None or config.optim.name not in _RULES:
        raise ConfigError(
            f"optimizer state can be exported of optim.name {', '.join(_RULES)}; this run's is "
            f"{config.optim.target or config.optim.name}. Export the weights only: leave out --with optimizer"
        )


@dataclass(frozen=True)
class ExportedState:
    """A checkpoint's optimizer and progress.

    Attributes:
        tensors: The model's, then the optimizer's (`optimizer.exp_avg.NAME`), whole.
    """

    config: Config
    manifest: Manifest
    tensors: Mapping[str, Tensor]

    @property
    def progress(self) -> Progress:
        return Progress(**self.manifest.state["progress"])

    @property
    def epoch(self) -> float:
        return float(self.progress.samples / self._order.epoch_samples)

    @property
    def steps(self) -> int | None:
        """Updates of the whole run."""
        config = self.config
        facts = DataFacts(self._order.samples, None)
        return horizon(config.run, config.batch.global_size, facts, config.data.drop_last)

    @property
    def _order(self) -> Any:
        return segments_in(self.manifest.state["ledger"])[-1].order

    def optimizer(self, halves: Sequence[Sequence[str]] | None = None) -> torch.optim.Optimizer:
        """Return torch's optimizer with this state, in the run's parameter groups.

        Args:
            halves: Parameters of each group; None: the run's groups.
        """
        optim, trained = self.config.optim, {key.split(".", 2)[2] for key in self.tensors if key.startswith(OPTIMIZER)}
        parameters = {
            name: nn.Parameter(tensor, requires_grad=name in trained)
            for name, tensor in self.tensors.items()
            if not name.startswith(OPTIMIZER) and tensor.is_floating_point()
        }
        groups = parameter_groups(parameters.items(), optim)
        done = fraction_done(self.config.run, self.progress, self._order.epoch_samples)
        lowered = optim.model_copy(update={"lr": self.manifest.state.get("plateau", {}).get("lr", optim.lr)})
        rate = learning_rate(lowered, self.config.schedule, done, self.progress.steps, self.steps)
        if halves is not None:
            groups = _regrouped(groups, [[name for name in half if name in trained] for half in halves])
        torch_groups = [
            {
                "params": [(name, parameters[name]) for name in group["names"]],
                "lr": rate * group["lr_scale"],
                "initial_lr": optim.lr * group["lr_scale"],
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ]
        own: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
        if optim.name == "sgd":
            own = {"momentum": optim.momentum, "nesterov": optim.nesterov}
        rule: Any = _RULES[optim.name]
        optimizer: torch.optim.Optimizer = rule(torch_groups, lr=optim.lr, **own)
        for key, tensor in self.tensors.items():
            if key.startswith(OPTIMIZER):
                _, entry, name = key.split(".", 2)
                optimizer.state[parameters[name]][entry] = tensor
        return optimizer

    def save_torch(self, model: Mapping[str, Tensor], file: Any) -> None:
        """Write a file of torch that any loop reads."""
        records = {"step": self.progress.steps, "samples": self.progress.samples, "epoch": self.epoch}
        state = self.optimizer().state_dict()
        torch.save({"model_state_dict": model, "optimizer_state_dict": state, **records}, file)

    def save_for_trainer(self, folder: Path, model: nn.Module) -> None:
        """Write what `Trainer.train(resume_from_checkpoint=folder)` reads beside the model."""
        decays, names = trainer_decays(model), [name for name, _ in model.named_parameters()]
        halves = [[name for name in names if (name in decays) is first] for first in (True, False)]
        optimizer, steps = self.optimizer(halves), self.progress.steps
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        rates = {key: [group[key] for group in optimizer.param_groups] for key in ("initial_lr", "lr")}
        schedule = {"base_lrs": rates["initial_lr"], "_last_lr": rates["lr"], "last_epoch": steps}
        lambdas = [None] * len(rates["lr"])
        torch.save({**schedule, "_step_count": steps + 1, "lr_lambdas": lambdas}, folder / "scheduler.pt")
        state = {"global_step": steps, "epoch": self.epoch, "max_steps": self.steps or 0, "log_history": []}
        state |= {"train_batch_size": self.config.batch.global_size, "logging_steps": 1}
        state["stateful_callbacks"] = {"TrainerControl": {"args": {}, "attributes": {}}}  # it saves into it
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def save_dcp(self, model: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint of torch.distributed.checkpoint; weights under both of torchtitan's names for them."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_saver import save

        saved = self.optimizer().state_dict()
        flat: dict[str, Any] = {}
        for group in saved["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                flat |= {f"state.{name}.{entry}": value for entry, value in saved["state"].get(number, {}).items()}
                settings = {key: value for key, value in group.items() if not key.startswith("param")}
                flat |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
        state = {"model": dict(model), "optimizer": flat, "train_state": {"step": torch.tensor(self.progress.steps)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process
            save(state, checkpoint_id=folder, no_dist=True)
        metadata: Any = FileSystemReader(folder).read_metadata()
        for index, place in list(metadata.storage_data.items()):
            name = index.fqn.removeprefix("model.")
            if name != index.fqn:
                metadata.storage_data[type(index)(name, index.offset, index.index)] = place
                metadata.state_dict_metadata[name] = metadata.state_dict_metadata[index.fqn]
                metadata.planner_data[name] = (name,)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _regrouped(groups: list[dict[str, Any]], halves: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the groups as Trainer makes them. Raises ConfigError if their parameters have different settings."""
    by_name = {name: group for group in groups for name in group["names"]}
    regrouped = []
    for half in halves:
        settings = {(by_name[name]["lr_scale"], by_name[name]["weight_decay"]) for name in half} or {(1.0, 0.0)}
        if len(settings) > 1:
            raise ConfigError(
                "--with optimizer: Trainer has one group of matrices and one of biases and norms, but this run has "
                "several weight decays or rates within one of them; use --format torch or dcp"
            )
        ((scale, decay),) = settings
        regrouped.append({"names": half, "lr_scale": scale, "weight_decay": decay})
    return regrouped


@dataclass(frozen=True, slots=True)
class ExportArguments:
    """The options of an export.

    Attributes:
        step: Step of the checkpoint; None: the newest that verifies, or the best if the run is to end with it.
        best: Whether to export the checkpoint with the best metric.
        to: A folder, or a file with the suffix of the format; None: in the run's folder.
        format: `auto` is peft for an adapter, hf for another Hugging Face model, otherwise safetensors.
        merge: Whether to add an adapter to its base, and export that.
        optimizer: Whether to export optimizer state and progress, too.
        force: Whether to replace the target.
        trust_remote_code: For hf: whether code that comes with a downloaded model may run.
        trust_run: For hf: whether code that the config of another user's run names may run.
        hub: For hf: a repository to upload the folder to.
    """

    step: int | None = None
    best: bool = False
    to: Path | None = None
    format: Literal["auto", "safetensors", "torch", "hf", "dcp", "peft"] = "auto"
    merge: bool = False
    optimizer: bool = False
    force: bool = False
    trust_remote_code: bool = False
    trust_run: bool = False
    hub: HubTarget | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model.

    Attributes:
        checkpoint: its source.
        target: the file; with `hf` the folder.
        tensors, elements: their numbers.
        broken: newer checkpoints that could not be used, and why.
        transforms: names of the run's transforms, which are not in the file.
        url: of the commit on the hub, if it was uploaded.
    """

    checkpoint: str
    step: int
    form: Form
    target: Path
    tensors: int
    elements: int
    broken: Mapping[str, str]
    transforms: Sequence[str] = ()
    url: str | None = None


def export(run: Path, arguments: ExportArguments) -> Exported:
    """Export a model, whole or not at all.

    Args:
        run: its folder, its checkpoints' folder, or a checkpoint.

    Raises:
        ConfigError: the arguments contradict each other or the run, the target exists, or code isn't trusted.
        RunFailed: no checkpoint can be read, or the disk is full.
    """
    location = find(run)
    step = _step(location, arguments)
    loaded = _config_of(location)
    config = loaded.config
    form = _form(config.model, arguments)
    if arguments.optimizer or form == "dcp":
        if form in ("safetensors", "peft") or arguments.merge:
            raise ConfigError("--with optimizer needs --format torch, hf or dcp; safetensors has no place for it")
        refuse_other_optimizers(config)
    if arguments.hub is not None:
        arguments.hub.check(form)
    if form == "hf" or arguments.merge:  # refused before anything large is read
        config = to_rebuild(loaded, trusted=arguments.trust_run)
    if arguments.to is not None:
        _refuse_to_overwrite(_target(None, form, "", arguments.to), form, force=arguments.force)
    model = _read_model(location.storage, step, optimizer=arguments.optimizer or form == "dcp")
    adapter, given = adapter_in(model.manifest), UserObjects(trust_remote_code=arguments.trust_remote_code)
    if arguments.merge:
        if adapter is None:
            raise ConfigError(f"--merge: {model.name} has no adapter; leave it out")
        model = replace(model, **merged(config, adapter, model.tensors, given))
        config = config.with_values(model=PLAIN)
    elif adapter is not None and (form == "hf" or (arguments.format == "auto" and not _names_a_file(arguments.to))):
        form = "peft"  # also of a PeftModel that was passed in Python
    target = _target(run if location.run == run.absolute() else location.run, form, model.name, arguments.to)
    _refuse_to_overwrite(target, form, force=arguments.force)
    name = arguments.hub.name if arguments.hub is not None else target.name
    card = partial(card_for, target, name, manifest=model.manifest, run=location.run)
    try:
        _write(model, config, form, target, given, adapter, card)
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
        url=None if arguments.hub is None else arguments.hub.upload(target),
    )


# --- the checkpoint -----------------------------------------------------------------------------------------------


def _step(location: CheckpointLocation, arguments: ExportArguments) -> int | None:
    """Return the checkpoint's step; None for the newest with a model that verifies."""
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
        raise ConfigError("--best: this run's config has no metric (checkpoint.best); give --step")
    best = Retention(location.storage, config.checkpoint, epoch_samples=1).best
    if best is None:
        raise ConfigError(f"no checkpoint in {location.place} has {config.checkpoint.best} in it; give --step")
    return best


def _config_of(location: CheckpointLocation) -> LoadedConfig:
    """Return the config of the run or, for checkpoints without their run, of the newest that can be read."""
    if location.loaded is not None:
        return location.loaded
    names = names_by_step(location.storage.names())
    broken: dict[str, str] = {}
    for name in [names[step] for step in sorted(names, reverse=True)]:
        try:
            manifest = read_manifest(location.storage, name)
        except CorruptCheckpoint as fault:
            broken[name] = str(fault)
            continue
        file = f"{location.where(name)}/{MANIFEST}"
        loaded = validate(manifest.config)
        run = RunConfig(file, Path(file).parent, known_as(manifest.run, manifest.config))
        return replace(loaded, origins=dict.fromkeys(loaded.origins, run.name), runs=(run,))
    raise _no_usable_checkpoint(location.storage, broken)


@dataclass(frozen=True, slots=True)
class _SavedModel:
    """A checkpoint's model in memory, without the rest of the checkpoint.

    Attributes:
        tensors: by the model's own names, tied ones once.
        tied: other names of tied tensors, and the names that are saved.
        optimizer: its optimizer's, if requested.
        broken: as in `Exported`.
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
            wanted = (_MODEL, *([OPTIMIZER] if optimizer else _EVALUATED))  # the former goes with what is trained
            read = Reader(storage, name, manifest).tensors(key for key in manifest.tensors if key.startswith(wanted))
            others = {
                key: tensor
                for key, tensor in read.items()
                if optimizer and key.startswith(OPTIMIZER) and not key.startswith(_EVALUATED)
            }
            tensors = {
                key.removeprefix(prefix): tensor
                for prefix in (_MODEL, *(() if optimizer else _EVALUATED))
                for key, tensor in read.items()
                if key.startswith(prefix)
            }
            return _SavedModel(name, manifest, tensors, tied, others, broken)
        except CorruptCheckpoint as fault:
            broken[name] = str(fault)
    raise _no_usable_checkpoint(storage, broken)


def _no_usable_checkpoint(storage: Storage, broken: Mapping[str, str]) -> RunFailed:
    listed = "".join(f"\n  {name}: {why}" for name, why in broken.items())
    return RunFailed(f"{storage.place} has no checkpoint that can be used:{listed}", kind=FailureKind.DAMAGED)


def _transforms(manifest: Manifest) -> list[str]:
    names = manifest.environment.get(TRANSFORMS)
    if isinstance(names, list):
        return [str(name) for name in names]
    targets = [section.get("target") for section in manifest.config.get("transforms") or ()]  # of a session
    return ["one that was passed in Python" if target == GIVEN else str(target) for target in targets]


# --- the file -----------------------------------------------------------------------------------------------------


def _form(model: Model, arguments: ExportArguments) -> Form:
    """Return the requested format; else the one of the file's suffix; else the one that suits the model."""
    form, to = arguments.format, arguments.to
    suffix = to.suffix if to is not None and not to.is_dir() else ""
    named = _FORMS.get(suffix)
    if named is None and suffix[1:].isalpha():
        forms = ", ".join(f"*{known}" for known in _FORMS)
        raise ConfigError(f"--to {to}: unknown format; a file is one of {forms}, or a folder")
    if form == "auto":
        of_adapter = model.adapter is not None and not arguments.merge
        return named or ("peft" if of_adapter else "hf" if model.kind == "huggingface" else "safetensors")
    if named is not None and named != form:
        raise ConfigError(f"--format {form} contradicts the file name {to}; leave one of them out")
    if form == "hf" and model.kind == "given":
        raise ConfigError(
            "--format hf builds the model from the config, and this one was passed in Python; if it is of the "
            "transformers library, from_pretrained reads the folder model/ of the run; otherwise use --format "
            "safetensors or torch"
        )
    if form == "hf" and model.kind not in ("huggingface", "custom"):
        raise ConfigError(_not_of_transformers(f"a model of kind {model.kind}"))
    return form


def _names_a_file(to: Path | None) -> bool:
    return to is not None and to.suffix in _FORMS and not to.is_dir()


def _target(run: Path | None, form: Form, name: str, to: Path | None) -> Path:
    if to is not None and _names_a_file(to):
        return to
    if to is None and run is None:
        raise ConfigError(f"{name} is in no run's folder; give the target with --to")
    folder = to or cast("Path", run) / _EXPORTS / name
    if form in _FOLDERS:
        return folder
    return folder / (FILE if form == "safetensors" else "model.pt")


def _refuse_to_overwrite(target: Path, form: Form, *, force: bool) -> None:
    entries = list(target.iterdir()) if target.is_dir() else []
    if not target.exists() or (target.is_dir() and not entries):
        return
    if form in _FOLDERS and not target.is_dir():
        raise ConfigError(f"{target} is a file, and --format {form} writes a folder")
    if not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    is_model = not {"config.json", ADAPTER_CONFIG, ".metadata"}.isdisjoint(entry.name for entry in entries)
    if target.is_dir() and not (is_model and all(entry.is_file() for entry in entries)):
        raise ConfigError(f"{target} holds more than a model: --force doesn't delete it; give another folder")


def _write(
    saved: _SavedModel,
    config: Config,
    form: Form,
    target: Path,
    given: UserObjects,
    adapter: Adapter | None,
    card: Callable[[str], AbstractContextManager[None]],
) -> None:
    others = {other: saved.tensors[name] for other, name in saved.tied.items()}
    state = ExportedState(config, saved.manifest, {**saved.tensors, **saved.optimizer}) if saved.optimizer else None
    match form:
        case "safetensors":
            save_tensors(saved.tensors, target)
        case "torch":
            with replacing_file(target) as new, new.open("wb") as file:
                if state is None:
                    torch.save({**saved.tensors, **others}, file)
                else:
                    state.save_torch({**saved.tensors, **others}, file)
        case "hf":
            model = _build_model(saved, config, given)
            tokenizer = tokenizer_of(config.model, config.data.train)
            also = None if state is None else partial(state.save_for_trainer, model=model)
            with card(type(model).__name__):
                save_for_transformers(model, model_tensors(model), tensors_of(model), target, tokenizer, also)
        case "peft":
            if adapter is None:
                raise ConfigError("--format peft is for adapters (model.adapter), and this run trained none")
            with card("AutoPeftModel"), replacing_folder(target) as folder:
                save_adapter(adapter, saved.tensors, folder)
                add_tokenizer(tokenizer_of(config.model, config.data.train), folder)
                checksums.record_folder(folder, {})
        case "dcp":
            assert state is not None
            with replacing_folder(target) as folder:
                state.save_dcp({**saved.tensors, **others}, folder)


def _disk_error(error: BaseException) -> str:
    """Return the disk's message: torch's writer raises another one when it is closed."""
    before = error.__context__
    while before is not None and not isinstance(error, OSError):
        error, before = before, before.__context__
    return str(error)


def _build_model(saved: _SavedModel, config: Config, given: UserObjects) -> nn.Module:
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
