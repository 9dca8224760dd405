"""Activation checkpointing of any module, without a run.

checkpointed = lockstep.checkpoint_activations(model, blocks=[Block])    every Block is computed again from its inputs
print(checkpointed)                                                      activation checkpointing, full: blocks.0, ...
checkpointed.look()                                                      after each update, for mode adaptive
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from pydantic import ValidationError
from torch import nn

from lockstep.config.schema import ActivationCheckpointing
from lockstep.core.errors import ConfigError
from lockstep.distributed import user_collectives
from lockstep.distributed.memory import peak_memory, rank_memory
from lockstep.models.blocks import blocks_in_line, repeated_blocks
from lockstep.transforms.activation_checkpointing import Recomputation, RecomputeBlocks, none_of, refuse

Mode = Literal["full", "selective", "segments", "budget", "adaptive"]


@dataclass(slots=True)
class Checkpointed:
    """The activation checkpointing of a model.

    Attributes:
        blocks: names of the modules whose forward was replaced.
    """

    mode: str
    blocks: tuple[str, ...]
    _recomputation: Recomputation
    _threshold: float
    _look_every: int
    _device: torch.device
    _limit: int | None
    _looks: int = field(default=0)

    @property
    def on(self) -> bool:
        """True if activations are computed again, from the next forward on."""
        return self._recomputation.switch.on

    def look(self) -> bool:
        """Switch checkpointing on if a rank's peak memory has passed the threshold; return whether it is on.

        For mode `adaptive`: call it after each update, on all ranks together. Every `look_every`-th call looks.
        """
        self._looks += 1
        if self._limit is None or self.on or self._looks % self._look_every:
            return self.on
        used = peak_memory(self._device) / self._limit
        self._recomputation.switch.on = any(user_collectives.all_ranks().gather(used > self._threshold))
        return self.on

    def __str__(self) -> str:
        return str(self._recomputation)


def checkpoint_activations(
    model: nn.Module,
    blocks: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    every: int = 1,
    *,
    mode: Mode = "full",
    segments: int = 4,
    budget: float = 0.5,
    threshold: float = 0.8,
    look_every: int = 100,
) -> Checkpointed:
    """Compute parts of a model again in the backward instead of storing their activations.

    Works in place; parameter names stay. Gradients are bitwise identical, and dropout draws the same. Call it before
    DDP, FSDP or compiling. A second call must be for other modules, outside those of the first.

    Args:
        blocks: classes of the modules that are computed again, each separately: `[Block]`, or `[Attention, MLP]`.
            None: the repeated layers of the model.
        every: for full, selective, adaptive: every n-th of these modules, from the first.
        mode: as `memory.activation_checkpointing.mode` of a config: full, selective, segments, budget, adaptive.
        segments: for mode segments: number of segments of each list of blocks; of a Sequential, of all its children.
        budget: for mode budget: share of all activations' memory that may be kept.
        threshold: for mode adaptive: share of a rank's memory.
        look_every: for mode adaptive: number of calls of `look()` for each look.

    Raises:
        ConfigError: the model has no such modules, or a cache that they write into; an argument belongs to another
            mode; a module is computed again already; or one keeps running means, which a second forward would count
            twice. In the first backward: a module changes its state (a mean or counter of its own, spectral norm).
            In its first forward: it writes to its input in place.
    """
    if getattr(getattr(model, "config", None), "use_cache", False):  # of the transformers library
        raise ConfigError(
            "checkpoint_activations: blocks that are computed again would write into the model's cache of keys twice; "
            "set model.config.use_cache = False while training"
        )
    options = _options(
        mode=mode, every=every, segments=segments, budget=budget, threshold=threshold, look_every=look_every
    )
    classes = [blocks] if isinstance(blocks, type) else blocks
    names: Sequence[str] = _of_classes(model, classes) if classes is not None else repeated_blocks(model)
    if blocks is None and mode == "segments":
        names = blocks_in_line(model, names)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    axis = user_collectives.all_ranks()
    transform = RecomputeBlocks(options, names, broadcast=axis.broadcast)
    refuse(transform.refuses(model, device))
    recomputation = transform.applied(model)
    limit = rank_memory(device, axis) if mode == "adaptive" else None
    return Checkpointed(mode, recomputation.blocks, recomputation, threshold, look_every, device, limit)


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[str]:
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ConfigError(
                f"checkpoint_activations: blocks are classes of modules, such as [Block], and not {cls!r}"
            )
    names = [name for name, module in model.named_modules() if name and type(module) in classes]
    if not names:
        raise ConfigError(f"checkpoint_activations: {none_of(model, [cls.__name__ for cls in classes])}")
    return names


def _options(**options: Any) -> ActivationCheckpointing:
    """Return the options as a config's section. Raises ConfigError if they are invalid."""
    if options["mode"] not in get_args(Mode):
        raise ConfigError(f"checkpoint_activations: mode {options['mode']!r} is none of {', '.join(get_args(Mode))}")
    try:
        return ActivationCheckpointing(**options)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"]))
            problems.append(f"{name}: " * bool(name) + problem["msg"].removeprefix("Value error, "))
        raise ConfigError(f"checkpoint_activations: {'; '.join(problems)}") from error
