"""Activation checkpointing of any module, without a run.

made = lockstep.checkpoint_activations(model, blocks=[Block])      every Block is computed again from its inputs
print(made)                                                         activation checkpointing, full: blocks.0, ...
made.look()                                                         after each update, for mode adaptive
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
    """What was wrapped.

    Attributes:
        mode: as asked.
        blocks: names of the modules whose forward was replaced.
    """

    mode: str
    blocks: tuple[str, ...]
    _made: Recomputation
    _threshold: float
    _look_every: int
    _device: torch.device
    _limit: int | None
    _looks: int = field(default=0)

    @property
    def on(self) -> bool:
        """Whether activations are computed again, from the next forward on."""
        return self._made.switch.on

    def look(self) -> bool:
        """For mode `adaptive`, after each update, on all ranks together: every so-many-th call looks whether any
        rank's peak memory has passed the threshold, and then switches on; `on`. Does nothing in another mode."""
        self._looks += 1
        if self._limit is None or self.on or self._looks % self._look_every:
            return self.on
        used = peak_memory(self._device) / self._limit
        self._made.switch.on = any(user_collectives.all_ranks().gather(used > self._threshold))
        return self.on

    def __str__(self) -> str:
        return str(self._made)


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
    """Computes parts of a model again in the backward instead of keeping what their backward needs. In place; names
    stay as they are, gradients the same to the bit, and dropout draws what it drew. Before DDP or FSDP, or compiling.

    Args:
        blocks: classes of the modules that are computed again, each on its own: `[Block]`, or `[Attention, MLP]` to
            have these apart. None: the repeated layers of the model, found by themselves.
        every: full, selective, adaptive: so-many-th of these modules, from the first.
        mode: as `memory.activation_checkpointing.mode` of a config: full, selective, segments, budget, adaptive.
        segments: of mode segments: into how many each list of blocks is cut; of a Sequential, all of its children.
        budget: of mode budget: share of what all would hold that may be kept.
        threshold: of mode adaptive: share of a rank's memory.
        look_every: of mode adaptive: calls of `look()` from one look to the next.

    A second call is for other modules, which lie in none of the first's.

    Raises:
        ConfigError: the model has no such modules, or a cache that they write into; an argument belongs to another
            mode; a module is computed again already; or one keeps running means, which a second forward would count
            twice. In the first backward: a module changes what it keeps (a mean or counter of its own, spectral norm).
            In its first forward: it writes to its input in place.
    """
    if getattr(getattr(model, "config", None), "use_cache", False):  # of the transformers library
        raise ConfigError(
            "checkpoint_activations: blocks that are computed again would write into the model's cache of keys twice; "
            "set model.config.use_cache = False while training"
        )
    asked = _options(
        mode=mode, every=every, segments=segments, budget=budget, threshold=threshold, look_every=look_every
    )
    classes = [blocks] if isinstance(blocks, type) else blocks
    found: Sequence[str] = _of_classes(model, classes) if classes is not None else repeated_blocks(model)
    if blocks is None and mode == "segments":
        found = blocks_in_line(model, found)
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    axis = user_collectives.all_ranks()
    transform = RecomputeBlocks(asked, found, broadcast=axis.broadcast)
    refuse(transform.refuses(model, device))
    made = transform.applied(model)
    limit = rank_memory(device, axis) if mode == "adaptive" else None
    return Checkpointed(mode, made.blocks, made, threshold, look_every, device, limit)


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[str]:
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise ConfigError(
                f"checkpoint_activations: blocks are classes of modules, such as [Block], and not {one!r}"
            )
    found = [name for name, module in model.named_modules() if name and type(module) in classes]
    if not found:
        raise ConfigError(f"checkpoint_activations: {none_of(model, [one.__name__ for one in classes])}")
    return found


def _options(**asked: Any) -> ActivationCheckpointing:
    """Raises ConfigError: what the schema says against them."""
    if asked["mode"] not in get_args(Mode):
        raise ConfigError(f"checkpoint_activations: mode {asked['mode']!r} is none of {', '.join(get_args(Mode))}")
    try:
        return ActivationCheckpointing(**asked)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, one['loc'])) + ': ' if one['loc'] else ''}{one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()
        )
        raise ConfigError(f"checkpoint_activations: {said}") from error
