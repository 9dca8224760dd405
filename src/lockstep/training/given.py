"""What a program hands over in Python, in place of what a config names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.optim.stepping import needs_closure

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config


@dataclass(frozen=True, slots=True)
class Given:
    """Objects in place of what a config names.

    Attributes:
        model: a module (its weights are kept), or a function that makes one (seeded).
        dataset, collate: a map-style Dataset, and how its items become a batch.
        evaluation: further Datasets by name.
        objective: with `count` and `loss_sum` (`core.protocols.Objective`), or one of torch's losses.
        optimizer: makes a torch optimizer from parameter groups.
        schedule: (step from 0, steps of the run or None) -> learning rate as a share of its peak.
        trust_remote_code: let a Hugging Face model run code that comes with its weights.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    objective: object | None = None
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int, int | None], float] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError with all that is of the wrong kind; data sets are looked at where they are opened."""
        problems = [Problem("", name, why) for name, why in _of_wrong_kind(self) if why is not None]
        if problems:
            raise ConfigError(problems)


def _of_wrong_kind(given: Given) -> Iterator[tuple[str, str | None]]:
    """By argument of `lockstep.train`: what it should be instead; None: nothing is wrong with it."""
    yield "model", _named(given.model, "model: {kind: huggingface, task: causal-lm, pretrained: NAME}")
    yield "optimizer", _optimizer(given.optimizer)
    yield "schedule", _schedule(given.schedule)
    yield "collate", _collate(given.collate)
    yield "evaluation", _evaluation(given.evaluation)


def _optimizer(given: object) -> str | None:
    if isinstance(given, torch.optim.Optimizer):
        return needs_closure(type(given)) or (
            f"is an object of {_kind(given)}, which holds parameters that a strategy may replace; hand over what makes "
            f"one: optimizer=lambda groups: {_kind(given)}(groups, lr=...)"
        )
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return needs_closure(given)
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
    if given is None or callable(given):
        return None
    return _named(given, "schedule: {kind: cosine}") or f"is of type {_kind(given)}; {wanted}"


def _collate(given: object) -> str | None:
    if given is None or callable(given):
        return None
    return f"is of type {_kind(given)}; hand over a function: list of items -> batch"


def _evaluation(given: object) -> str | None:
    if isinstance(given, Mapping):
        return None
    return f"is of type {_kind(given)}; hand over data sets by name: {{'held-out': dataset}}"


def _named(given: object, key: str) -> str | None:
    return f"is the text {given!r}; a name goes into the config: {key}" if isinstance(given, str) else None


def _kind(given: object) -> str:
    return type(given).__name__


@dataclass(frozen=True, slots=True)
class Handed:
    """A key of a config that stands for an object handed over in Python.

    Attributes:
        key: whose value is `given`.
        argument: of `lockstep.train` that takes the object.
        wanted: what it is.
        instead: a setting that needs no object.
    """

    key: str
    argument: str
    wanted: str
    instead: str


_MODULE = "a torch.nn.Module, or a function that makes one"
_DATASET = "a map-style Dataset"
_OBJECTIVE = "an object with `count` and `loss_sum`"
_COLLATE = "a function: list of items -> batch"
_OPTIMIZER = "a function of parameter groups that makes a torch optimizer"
_SCHEDULE = "a function (step, steps) -> share of optim.lr"


def handed_in(config: Config) -> Iterator[Handed]:
    """Every object that this config leaves to the program."""
    if config.model.kind == "given":
        yield Handed("model.kind", "model", _MODULE, "custom")
    if config.objective.kind == "given":
        yield Handed("objective.kind", "objective", _OBJECTIVE, "custom")
    yield from _handed_data(config)
    if config.optim.name == "given":
        yield Handed("optim.name", "optimizer", _OPTIMIZER, "adamw")
    if config.schedule.kind == "given":
        yield Handed("schedule.kind", "schedule", _SCHEDULE, "cosine")


def _handed_data(config: Config) -> Iterator[Handed]:
    sources = {"data.train": config.data.train}
    sources |= {f"data.evaluation.{name}": section for name, section in config.data.evaluation.items()}
    for key, section in sources.items():
        if section.kind != "given":
            continue
        yield Handed(f"{key}.kind", "dataset" if key == "data.train" else "evaluation", _DATASET, "custom")
        if section.collate is not None:
            yield Handed(f"{key}.collate", "collate", _COLLATE, "null")


def refuse_missing(config: Config, given: Given) -> None:
    """Raises ConfigError: the config says that an optimizer, a schedule or a collate function was handed over, and here
    none was. Models, data and objectives are looked for where they are used."""
    missing = [
        _missing(one)
        for one in handed_in(config)
        if one.argument in ("optimizer", "schedule", "collate") and getattr(given, one.argument) is None
    ]
    if missing:
        raise ConfigError(missing)


def _missing(one: Handed) -> Problem:
    why = f"`given` takes {one.wanted} handed over in Python, and nothing was; add {one.argument}=..., or write "
    return Problem("", one.key, f"{why}{one.key}: {one.instead}")


def refuse_given(loaded: LoadedConfig) -> None:
    """Raise ConfigError if the config names objects, which nobody can hand over from the command line."""
    found = list(handed_in(loaded.config))
    if not found:
        return
    arguments = ", ".join(dict.fromkeys(f"{one.argument}=..." for one in found))
    run = str(loaded.runs[0].run) if loaded.runs else None
    call = f'lockstep.train("{run or "CONFIG"}", {arguments})'
    accept = "" if run is None else " and accept the change: --accept-changes"
    raise ConfigError([Problem("", one.key, _handed_over(one, call) + accept) for one in found])


def _handed_over(one: Handed, call: str) -> str:
    another = "name a `custom` one here" if one.instead == "custom" else f"write {one.key}: {one.instead}"
    return f"`given` is an object handed over in Python; hand it over again: {call}, or {another}"


def not_given(key: str, wanted: str, got: object) -> ConfigError:
    """What a config leaves to the program, and the program didn't give."""
    found = "nothing was" if got is None else f"a {type(got).__name__} was"
    return ConfigError(Problem("", key, f"kind `given` takes {wanted} handed over in Python, and {found}"))
