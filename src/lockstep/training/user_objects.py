"""The objects that a program passes in Python instead of what a config names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from lockstep.config.trust import GIVEN
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.extensions import instance, unimplemented
from lockstep.core.protocols import Monitor, ObjectStore, Transform
from lockstep.core.tracking import Tracker
from lockstep.optim.stepping import closure_refusal

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config, Extension


class Objects(TypedDict, total=False):
    """Objects that replace what a config names: the keyword arguments that `train`, `session` and `verify` share.

    Attributes:
        model: a module (its weights are kept), or a function that makes one (its weights follow `run.seed`).
        train_dataset: a map-style Dataset. Items are a mapping (`labels`, `targets` are what the objective gets), a
            tuple (its last is the target), or a tensor.
        collate: makes a batch of a list of items: what an item may be, or a `lockstep.Batch`.
        eval_datasets: Datasets for evaluations, by name.
        objective: what the model is trained for, if its kind does not imply it: a `lockstep.Objective`, or one of
            torch's losses.
        optimizer: makes a torch optimizer from parameter groups, instead of `optim.name`. A function, because a
            strategy may replace parameters. Its own `lr` is the peak, unless the config sets `optim.lr`.
        schedule: (step from 0, steps of the run or None) -> learning rate as a share of its peak.
        monitors: see each report on the first rank, and may answer with requests (`lockstep.extend.Monitor`).
        trackers: record the run elsewhere, in threads of the first rank (`lockstep.extend.Tracker`).
        transforms: applied to the model before it is sharded (`lockstep.extend.Transform`).
        storage: holds the checkpoints instead of a folder (`lockstep.extend.ObjectStore`).
    """

    model: nn.Module | Callable[[], nn.Module] | None
    train_dataset: Any
    collate: Callable[[list[Any]], Any] | None
    eval_datasets: Mapping[str, Any]
    objective: object | None
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None
    schedule: Callable[[int, int | None], float] | None
    monitors: Sequence[Monitor]
    trackers: Sequence[Tracker]
    transforms: Sequence[Transform]
    storage: ObjectStore | None


_OFTEN_CALLED = {
    "data": "train_dataset",
    "dataset": "train_dataset",
    "evaluation": "eval_datasets",
    "loss": "objective",
}


@dataclass(frozen=True, slots=True)
class UserObjects:
    """The objects of one call, checked; attributes as of `Objects`.

    Attributes:
        trust_remote_code: let a Hugging Face model run code that comes with its weights.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    train_dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    eval_datasets: Mapping[str, Any] = field(default_factory=dict)
    objective: object | None = None
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int, int | None], float] | None = None
    monitors: Sequence[Monitor] = ()
    trackers: Sequence[Tracker] = ()
    transforms: Sequence[Transform] = ()
    storage: ObjectStore | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError with all objects of the wrong kind; datasets are checked where they are opened."""
        checks = {
            "model": _named(self.model, "model: {kind: huggingface, task: causal-lm, pretrained: NAME}"),
            "optimizer": _optimizer(self.optimizer),
            "schedule": _schedule(self.schedule),
            "collate": _collate(self.collate),
            "eval_datasets": None
            if isinstance(self.eval_datasets, Mapping)
            else f"is of type {_kind(self.eval_datasets)}; hand over datasets by name: {{'held-out': dataset}}",
            "monitors": _extensions(self.monitors, Monitor),
            "trackers": _extensions(self.trackers, Tracker),
            "transforms": _extensions(self.transforms, Transform),
            "storage": unimplemented(self.storage, ObjectStore) if self.storage is not None else None,
        }
        problems = [Problem("", name, why) for name, why in checks.items() if why is not None]
        if problems:
            raise ConfigError(problems)


def user_objects(arguments: Mapping[str, Any]) -> UserObjects:
    """Return the objects among the keyword arguments of a call.

    Raises:
        TypeError: there is no such argument; the message names the nearest.
        ConfigError: an object is of the wrong kind.
    """
    for name in arguments:
        if name in Objects.__annotations__:
            continue
        near = _OFTEN_CALLED.get(name) or closest_match(name, Objects.__annotations__)
        hint = f"did you mean {near}?" if near else f"pass {', '.join(Objects.__annotations__)}"
        raise TypeError(f"there is no argument {name}; {hint}")
    return UserObjects(**{name: value for name, value in arguments.items() if value is not None})


def _extensions(given: object, protocol: type) -> str | None:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return f"is of type {_kind(given)}; pass a list of lockstep.{protocol.__name__} objects"
    return next((f"[{at}] {why}" for at, thing in enumerate(given) if (why := unimplemented(thing, protocol))), None)


def _optimizer(given: object) -> str | None:
    if isinstance(given, torch.optim.Optimizer):
        return closure_refusal(type(given)) or (
            f"is an object of {_kind(given)}, which holds parameters that a strategy may replace; hand over what makes "
            f"one: optimizer=lambda groups: {_kind(given)}(groups, lr=...)"
        )
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return closure_refusal(given)
    if given is None or callable(given):
        return None
    return (
        _named(given, "optim: {name: adamw}") or f"is of type {_kind(given)}; hand over a function of parameter groups"
    )


def _schedule(given: object) -> str | None:
    wanted = "hand over a function (step, steps) -> share of optim.lr, or write schedule.kind in the config"
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return f"is an object of {_kind(given)}, whose state would not be saved; {wanted}"
    if isinstance(given, type) and issubclass(given, torch.optim.lr_scheduler.LRScheduler):
        return f"is the class {given.__name__}; {wanted}"
    if callable(given):
        try:
            inspect.signature(given).bind(0, 1)
        except TypeError as error:
            return f"can't be called with (step, steps): {error}; {wanted}"
        except ValueError:  # some builtins have no signature
            pass
    if given is None or callable(given):
        return None
    return _named(given, "schedule: {kind: cosine}") or f"is of type {_kind(given)}; {wanted}"


def _collate(given: object) -> str | None:
    if given is None or callable(given):
        return None
    return f"is of type {_kind(given)}; hand over a function: list of items -> batch"


def _named(given: object, key: str) -> str | None:
    return f"is the text {given!r}; a name goes into the config: {key}" if isinstance(given, str) else None


def _kind(given: object) -> str:
    return type(given).__name__


# --- keys of a config that stand for an object --------------------------------------------------------------------


_TAKES = {
    "model": ("a torch.nn.Module, or a function that makes one", "custom"),
    "objective": ("an object with `count` and `loss_sum`", "custom"),
    "train_dataset": ("a map-style Dataset", "custom"),
    "eval_datasets": ("a map-style Dataset", "custom"),
    "collate": ("a function: list of items -> batch", "null"),
    "optimizer": ("a function of parameter groups that makes a torch optimizer", "adamw"),
    "schedule": ("a function (step, steps) -> share of optim.lr", "cosine"),
    "monitors": ("monitors (`lockstep.extend.Monitor`)", "module:Name"),
    "trackers": ("trackers (`lockstep.extend.Tracker`)", "module:Name"),
    "transforms": ("transforms (`lockstep.extend.Transform`)", "module:Name"),
    "storage": ("an object store (`lockstep.extend.ObjectStore`)", "module:Name"),
}
"""The arguments of `lockstep.train`: what each takes, and a setting that needs no object."""


def given_keys(config: Config) -> dict[str, str]:
    """Return the keys of a config that stand for an object, and the argument that takes it."""
    keys: dict[str, tuple[str, str | None]] = {
        "model.kind": ("model", config.model.kind),
        "objective.kind": ("objective", config.objective.kind),
    }
    sets = {f"data.evaluation.{name}": section for name, section in config.data.evaluation.items()}
    for key, source in {"data.train": config.data.train, **sets}.items():
        keys[f"{key}.kind"] = ("train_dataset" if key == "data.train" else "eval_datasets", source.kind)
        if source.kind == "given":
            keys[f"{key}.collate"] = ("collate", source.collate)
    keys |= {"optim.name": ("optimizer", config.optim.name), "schedule.kind": ("schedule", config.schedule.kind)}
    for key, section in _extensions_in(config):
        argument = key.partition("[")[0].removeprefix("checkpoint.").removeprefix("monitor.")
        keys[f"{key}.target"] = (argument, section.target)
    return {key: argument for key, (argument, value) in keys.items() if value == GIVEN}


def _extensions_in(config: Config) -> Iterator[tuple[str, Extension]]:
    lists = {
        "monitors": config.monitors,
        "transforms": config.transforms,
        "monitor.trackers": config.monitor.trackers,
    }
    for name, sections in lists.items():
        yield from ((f"{name}[{index}]", section) for index, section in enumerate(sections))
    if config.checkpoint.storage is not None:
        yield "checkpoint.storage", config.checkpoint.storage


_CHECKED_HERE = ("optimizer", "schedule", "collate", "monitors", "trackers", "transforms", "storage")


def refuse_missing(config: Config, given: UserObjects) -> None:
    """Raise ConfigError if the config needs an object that wasn't passed; models, data and objectives check later."""
    missing = []
    for key, argument in given_keys(config).items():
        if argument in _CHECKED_HERE and not getattr(given, argument):
            expected, alternative = _TAKES[argument]
            why = f"`given` takes {expected} handed over in Python, and nothing was; add {argument}=..., or write"
            missing.append(Problem("", key, f"{why} {key}: {alternative}"))
    if missing:
        raise ConfigError(missing)


def refuse_given(loaded: LoadedConfig) -> None:
    """Raise ConfigError if the config needs objects, which can't be passed on the command line."""
    keys = given_keys(loaded.config)
    arguments = ", ".join(dict.fromkeys(f"{argument}=..." for argument in keys.values()))
    run = str(loaded.runs[0].run) if loaded.runs else None
    call = f'lockstep.train("{run or "CONFIG"}", {arguments})'
    accept = "" if run is None else " and accept the change: --accept-changes"
    problems = []
    for key, argument in keys.items():
        setting = _TAKES[argument][1]
        another = "name a `custom` one here" if setting == "custom" else f"write {key}: {setting}"
        why = f"`given` is an object handed over in Python; hand it over again: {call}, or {another}{accept}"
        problems.append(Problem("", key, why))
    if problems:
        raise ConfigError(problems)


def not_given(key: str, expected: str, got: object) -> ConfigError:
    """Return the error for an object that the config needs and that was not passed, or has the wrong type."""
    passed = "nothing was" if got is None else f"a {type(got).__name__} was"
    return ConfigError(Problem("", key, f"kind `given` takes {expected} handed over in Python, and {passed}"))


_TRACKERS = {
    "mlflow": "lockstep.monitor.mlflow_tracker:MlflowTracker",
    "trackio": "lockstep.monitor.trackio_tracker:TrackioTracker",
    "wandb": "lockstep.monitor.wandb_tracker:WandbTracker",
}


def user_monitors(config: Config, given: UserObjects) -> list[Monitor]:
    """Return the monitors that the config names, and those that were passed in Python."""
    return [*_instances(config, "monitors", Monitor), *given.monitors]


def user_trackers(config: Config, given: UserObjects) -> dict[str, Tracker]:
    """Return the trackers that the config names, and those that were passed in Python, by names of their own."""
    named: list[tuple[str, Tracker]] = []
    for index, section in enumerate(config.monitor.trackers):
        if section.target != GIVEN:
            key = f"monitor.trackers[{index}].target"
            home = _TRACKERS.get(section.target, section.target)
            named.append((section.target, instance("trackers", home, section.arguments, Tracker, key=key)))
    named += [(type(tracker).__name__, tracker) for tracker in given.trackers]
    trackers: dict[str, Tracker] = {}
    for name, tracker in named:
        trackers[name if name not in trackers else f"{name}-{len(trackers) + 1}"] = tracker
    return trackers


def transform_names(transforms: Sequence[Extension], given: UserObjects) -> list[str]:
    """Return the targets of the transforms that the config names, and the names of those that were passed in Python."""
    targets = [section.target for section in transforms if section.target != GIVEN]
    return [*targets, *(transform.name for transform in given.transforms)]


def user_transforms(config: Config, given: UserObjects) -> list[Transform]:
    """Return the transforms that the config names, and those that were passed in Python."""
    return [*_instances(config, "transforms", Transform), *given.transforms]


def _instances(config: Config, kind: str, protocol: type) -> list[Any]:
    return [
        instance(kind, section.target, section.arguments, protocol, key=f"{key}.target")
        for key, section in _extensions_in(config)
        if key.startswith(f"{kind}[") and section.target != GIVEN
    ]
