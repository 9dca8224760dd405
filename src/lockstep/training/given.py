"""What a program hands over in Python, in place of what a config names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.optim.stepping import needs_closure


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


def not_given(key: str, wanted: str, got: object) -> ConfigError:
    """What a config leaves to the program, and the program didn't give."""
    found = "nothing was" if got is None else f"a {type(got).__name__} was"
    return ConfigError(Problem("", key, f"kind `given` takes {wanted} handed over in Python, and {found}"))
