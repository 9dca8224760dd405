"""What a program hands over in Python, in place of what a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.core.errors import ConfigError, Problem


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


def not_given(key: str, wanted: str, got: object) -> ConfigError:
    """What a config leaves to the program, and the program didn't give."""
    found = "nothing was" if got is None else f"a {type(got).__name__} was"
    return ConfigError(Problem("", key, f"kind `given` takes {wanted} handed over in Python, and {found}"))
