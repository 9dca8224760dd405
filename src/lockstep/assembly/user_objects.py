"""The objects that a program passes in Python instead of config values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from lockstep.config.schema import GIVEN, Config, Extension
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.extensions import instance, unimplemented
from lockstep.core.protocols import Monitor, ObjectStore, Transform
from lockstep.core.tracking import TRACKERS, Tracker
from lockstep.optim.stepping import closure_refusal

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig


class Objects(TypedDict, total=False):
    """Objects that replace config values: the keyword arguments that `train`, `session` and `verify` share.

    Attributes:
        model: a module (its weights are kept), or a function that makes one (its weights follow `run.seed`).
        train_dataset: a map-style Dataset of mappings (`labels`, `targets` are what the objective gets), of tuples (the
            last is the target), or of tensors.
        collate: makes a batch of a list of items: what an item may be, or a `lockstep.Batch`.
        eval_datasets: Datasets for evaluations, by name.
        objective: what the model is trained for, if its kind does not imply it: a `lockstep.Objective`, or one of
            torch's losses.
        optimizer: makes a torch optimizer from parameter groups. Its own `lr` is the peak, unless the config has one.
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
    "data": "train_dataset", "dataset": "train_dataset", "evaluation": "eval_datasets", "loss": "objective",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UserObjects:
    """The objects of one call, checked; attributes as of `Objects`. `trust_remote_code`: see the flag."""

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
        if problems := [Problem("", name, why) for name, why in _wrong(self)]:
            raise ConfigError(problems)


def user_objects(arguments: Mapping[str, Any]) -> UserObjects:
    """Return the objects among the keyword arguments of a call. Raises TypeError, or ConfigError for a wrong kind."""
    for name in arguments:
        if name in Objects.__annotations__:
            continue
        near = _OFTEN_CALLED.get(name) or closest_match(name, Objects.__annotations__)
        hint = f"did you mean {near}?" if near else f"pass {', '.join(Objects.__annotations__)}"
        raise TypeError(f"there is no argument {name}; {hint}")
    return UserObjects(**{name: value for name, value in arguments.items() if value is not None})


def _wrong(given: UserObjects) -> Iterator[tuple[str, str]]:
    for name in ("model", "optimizer", "schedule", "collate"):
        value = getattr(given, name)
        if value is not None and (why := _refusal(name, value)):
            yield name, why
    datasets: object = given.eval_datasets
    if not isinstance(datasets, Mapping):
        yield "eval_datasets", f"is of type {type(datasets).__name__}; pass datasets by name: {{'held-out': dataset}}"
    for name, protocol in (("monitors", Monitor), ("trackers", Tracker), ("transforms", Transform)):
        values = getattr(given, name)
        if not isinstance(values, Sequence) or isinstance(values, str):
            yield name, f"is of type {type(values).__name__}; pass a list of lockstep.{protocol.__name__} objects"
            continue
        for index, value in enumerate(values):
            if why := unimplemented(value, protocol):
                yield name, f"[{index}] {why}"
    if given.storage is not None and (why := unimplemented(given.storage, ObjectStore)):
        yield "storage", why


def _refusal(name: str, value: Any) -> str | None:
    expected, kind = _TAKES[name][0], value if isinstance(value, type) else type(value)
    if isinstance(value, str):
        return f"is the text {value!r}; pass {expected}, or set {name} in the config"
    if name == "optimizer" and issubclass(kind, torch.optim.Optimizer):
        own = f"is an object of {kind.__name__}, but a strategy may replace its parameters"
        again = f"{own}; pass optimizer=lambda groups: {kind.__name__}(groups, lr=...)"
        return closure_refusal(kind) or (None if value is kind else again)
    if name == "schedule" and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return f"is a {kind.__name__}, and its state would not be saved; pass {expected}, or set schedule.kind"
    if not callable(value):
        return f"is of type {kind.__name__}; pass {expected}"
    if name == "schedule":
        try:
            inspect.signature(value).bind(0, 1)
        except TypeError as error:
            return f"can't be called with (step, steps): {error}; pass {expected}"
        except ValueError:  # some builtins have no signature
            pass
    return None


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
    lists = {"monitors": config.monitors, "transforms": config.transforms, "monitor.trackers": config.monitor.trackers}
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
            why = f"`given` takes {expected}, passed in Python; add {argument}=..., or write {key}: {alternative}"
            missing.append(Problem("", key, why))
    if missing:
        raise ConfigError(missing)


def refuse_given(loaded: LoadedConfig) -> None:
    """Raise ConfigError if the config needs objects, which can't be passed on the command line."""
    keys = given_keys(loaded.config)
    arguments = ", ".join(dict.fromkeys(f"{argument}=..." for argument in keys.values()))
    run = str(loaded.runs[0].run) if loaded.runs else "CONFIG"
    why = f'`given` is an object passed in Python; pass it again: lockstep.train("{run}", {arguments}), or write'
    if problems := [Problem("", key, f"{why} {key}: {_TAKES[argument][1]}") for key, argument in keys.items()]:
        raise ConfigError(problems)


def not_given(key: str, expected: str, got: object) -> ConfigError:
    """Return the error for an object that the config needs and that was not passed, or has the wrong type."""
    passed = "nothing" if got is None else f"a {type(got).__name__}"
    return ConfigError(Problem("", key, f"kind `given` takes {expected}, and {passed} was passed in Python"))


def user_monitors(config: Config, given: UserObjects) -> list[Monitor]:
    """Return the monitors of the config, and those passed in Python."""
    return [*_instances(config, "monitors", Monitor), *given.monitors]


def user_trackers(config: Config, given: UserObjects) -> dict[str, Tracker]:
    """Return the trackers of the config, and those passed in Python, by unique names."""
    named: list[tuple[str, Tracker]] = []
    for index, section in enumerate(config.monitor.trackers):
        if section.target != GIVEN:
            key = f"monitor.trackers[{index}].target"
            home = TRACKERS.get(section.target, section.target)
            named.append((section.target, instance("trackers", home, section.arguments, Tracker, key=key)))
    named += [(type(tracker).__name__, tracker) for tracker in given.trackers]
    trackers: dict[str, Tracker] = {}
    for name, tracker in named:
        trackers[name if name not in trackers else f"{name}-{len(trackers) + 1}"] = tracker
    return trackers


def transform_names(transforms: Sequence[Extension], given: UserObjects) -> list[str]:
    """Return the targets of the config's transforms, and the names of those passed in Python."""
    targets = [section.target for section in transforms if section.target != GIVEN]
    return [*targets, *(transform.name for transform in given.transforms)]


def user_transforms(config: Config, given: UserObjects) -> list[Transform]:
    """Return the transforms of the config, and those passed in Python."""
    return [*_instances(config, "transforms", Transform), *given.transforms]


def _instances(config: Config, kind: str, protocol: type) -> list[Any]:
    return [
        instance(kind, section.target, section.arguments, protocol, key=f"{key}.target")
        for key, section in _extensions_in(config)
        if key.startswith(f"{kind}[") and section.target != GIVEN
    ]
