"""Applies transforms in the order that they ask for.

[compile (after sync_batchnorm), sync_batchnorm]  -->  sync_batchnorm, compile
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.core.protocols import Transform


def transform(model: nn.Module, transforms: Sequence[Transform], device: torch.device) -> nn.Module:
    """The model after all transforms.

    Raises:
        ConfigError: one of them can't be applied to this model on this device.
    """
    for step in ordered(transforms):
        reason = step.refuses(model, device)
        if reason is not None:
            raise ConfigError(f"{step.name}: {reason}")
        model = step.apply(model)
    return model


def ordered(transforms: Sequence[Transform]) -> list[Transform]:
    """Each after those that it names; otherwise as given."""
    by_name = {step.name: step for step in transforms}
    graph = {step.name: [name for name in step.after if name in by_name] for step in transforms}
    return [by_name[name] for name in TopologicalSorter(graph).static_order()]
