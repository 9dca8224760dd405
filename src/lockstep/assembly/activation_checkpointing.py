"""Activation checkpointing of any module, without a run.

checkpointed = lockstep.checkpoint_activations(model, blocks=[Block])    every Block is computed again from its inputs
print(checkpointed)                                                      activation checkpointing, full: blocks.0, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

from lockstep.config.schema import ActivationCheckpointing
from lockstep.core.errors import ConfigError
from lockstep.models.blocks import repeated_blocks
from lockstep.transforms.activation_checkpointing import Recomputation, RecomputeBlocks, none_of, refuse

Mode = Literal["full", "selective"]


def checkpoint_activations(
    model: nn.Module,
    blocks: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    every: int = 1,
    *,
    mode: Mode = "full",
) -> Recomputation:
    """Compute parts of a model again in the backward instead of storing their activations.

    Works in place; parameter names stay. Gradients are bitwise identical, and dropout draws the same. Call it before
    DDP, FSDP or compiling. A second call must be for other modules, outside of the first call's.

    Args:
        blocks: classes of the modules that are computed again, each separately: `[Block]`, or `[Attention, MLP]`.
            None: the repeated layers of the model.
        every: every n-th of these modules, from the first.
        mode: as `memory.activation_checkpointing.mode` of a config: full or selective.

    Raises:
        ConfigError: the model has no such modules, or a cache that they write into; a module is computed again
            already, or keeps running means. In the first forward or backward: it changes its state or input.
    """
    if getattr(getattr(model, "config", None), "use_cache", False):  # of the transformers library
        raise ConfigError(
            "checkpoint_activations: a second forward would write into the model's cache of keys; set "
            "model.config.use_cache = False while training"
        )
    if mode not in get_args(Mode):
        raise ConfigError(f"checkpoint_activations: mode {mode!r} is none of {', '.join(get_args(Mode))}")
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"checkpoint_activations: every {every!r} is not a whole number above 0")
    options = ActivationCheckpointing(mode=mode, every=every)
    classes = [blocks] if isinstance(blocks, type) else blocks
    names: Sequence[str] = _of_classes(model, classes) if classes is not None else repeated_blocks(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    transform = RecomputeBlocks(options, names)
    refuse(transform.refuses(model, device))
    return transform.applied(model)


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[str]:
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ConfigError(f"checkpoint_activations: blocks are classes of modules, and not {cls!r}")
    names = [name for name, module in model.named_modules() if name and type(module) in classes]
    if not names:
        raise ConfigError(f"checkpoint_activations: {none_of(model, [cls.__name__ for cls in classes])}")
    return names
