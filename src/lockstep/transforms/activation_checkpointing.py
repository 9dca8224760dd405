"""Activation checkpointing: the activations that a forward keeps for the backward, and those that it computes again.

    full        keeps only the inputs of every nth block
    selective   also keeps the results of matrix products and attention in these blocks
    segments    keeps only the input of each run of blocks                              segments.py
    budget      keeps all of as many blocks as there is memory for                      activation_budget.py

A block's own `forward` is replaced, so that no name changes, and FSDP's hooks run around it: the parameters that FSDP
gathers for a block's backward exist when the block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import Transform
from lockstep.transforms.activation_budget import Broadcast, Budget
from lockstep.transforms.block_state import StateGuard
from lockstep.transforms.recomputing import Context, Recompute, is_replaced, replace_forward
from lockstep.transforms.segments import run_in_segments, split_into_segments

if TYPE_CHECKING:
    from lockstep.config.schema import ActivationCheckpointing

_CHANGED_BY_FORWARD = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_KEY = "memory.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The modules of a model that are computed again.

    Attributes:
        mode: The mode in the config.
        blocks: Names of the modules whose forward was replaced. Those of the last of several segments aren't computed
            again, and `budget` may keep some.
    """

    mode: str
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.blocks[:3]) + (f" and {len(self.blocks) - 3} more" if len(self.blocks) > 3 else "")
        return f"activation checkpointing, {self.mode}: {shown}"


class RecomputeBlocks(Transform):
    """Replaces the forwards of blocks by ones that keep less.

    Args:
        blocks: Names of the model's repeated layers; for segments, of those that form a chain.
        muted: Makes the context of the second forward, in which logging is dropped: the first has logged the same.
    """

    name = _KEY
    after = ("parallel.ddp.sync_batchnorm",)

    def __init__(
        self,
        options: ActivationCheckpointing,
        blocks: Sequence[str],
        muted: Callable[[], Context] = nullcontext,
        broadcast: Broadcast = lambda value: value,
    ) -> None:
        self._options = options
        self._blocks = blocks
        self._broadcast = broadcast
        self._recompute = Recompute(options.mode == "selective", muted)

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        chosen = self.chosen(model)
        if not chosen and self._options.modules != "blocks":
            return f"{none_of(model, self._options.modules)}; name classes that it has"
        if not chosen:
            return (
                f"a {type(model).__name__} has no repeated blocks: a ModuleList or Sequential of layers of one class; "
                "give it such a list, name classes (in a config memory.activation_checkpointing.modules, in Python "
                "blocks=[...]), or leave activation checkpointing out"
            )
        return _inside_of_another(chosen) or _already(model, chosen) or _running_means(model, chosen)

    def apply(self, model: nn.Module) -> nn.Module:
        _APPLY[self._options.mode](self, model, self.chosen(model))
        return model

    def applied(self, model: nn.Module) -> Recomputation:
        """Apply the transform; return the modules that are computed again."""
        self.apply(model)
        return Recomputation(self._options.mode, tuple(self.chosen(model)))

    def chosen(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that are computed again."""
        wanted = self._options.modules
        if wanted == "blocks":
            return list(self._blocks[:: self._options.every])
        names = [name for name, module in model.named_modules() if name and type(module).__name__ in wanted]
        return names[:: self._options.every]

    def selective(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that torch's selective checkpointing computes again."""
        return self.chosen(model) if self._options.mode == "selective" else []

    def _each(self, model: nn.Module, chosen: Sequence[str]) -> None:
        for name in chosen:
            block = model.get_submodule(name)
            # A partial of the bound method, which a copy of the model copies
            replace_forward(block, partial(self._recompute, StateGuard({name: block}), block.forward))

    def _segments(self, model: nn.Module, chosen: Sequence[str]) -> None:
        lists: dict[str, list[str]] = {}
        for name in chosen:
            lists.setdefault(name.rpartition(".")[0], []).append(name)
        for names in lists.values():
            run_in_segments(model, split_into_segments(names, self._options.segments), self._recompute)

    def _budget(self, model: nn.Module, chosen: Sequence[str]) -> None:
        Budget(model, chosen, self._options.budget, self._recompute, self._broadcast)


def refuse(reason: str | None) -> None:
    """Raise ConfigError if there is a reason."""
    if reason is not None:
        raise ConfigError(Problem("", _KEY, reason))


def none_of(model: nn.Module, classes: Sequence[str]) -> str:
    """Return the message that the model has no module of these classes, and which it has."""
    kinds = list(dict.fromkeys(type(module).__name__ for name, module in model.named_modules() if name))
    return f"a {type(model).__name__} has no module of class {' or '.join(classes)}; it has {', '.join(kinds[:12])}"


def _inside_of_another(chosen: Sequence[str]) -> str | None:
    for name in chosen:
        for other in chosen:
            if other.startswith(f"{name}."):
                return f"{other} is in {name}, and would be computed three times; name one of their classes"
    return None


def _already(model: nn.Module, chosen: Sequence[str]) -> str | None:
    """Return the message that a block, a module around it or a module inside it was replaced before."""
    before = [name for name, module in model.named_modules() if is_replaced(module)]
    for name in chosen:
        for other in before:
            if name == other:
                return f"{name} is computed again already, by an earlier call; leave one of the two out"
            if name.startswith(f"{other}.") or other.startswith(f"{name}."):
                return (
                    f"{other} is computed again already, by an earlier call, and with {name} a part of it would be "
                    "computed three times; leave one of the two out"
                )
    return None


def _running_means(model: nn.Module, chosen: Sequence[str]) -> str | None:
    for block in chosen:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if isinstance(module, _CHANGED_BY_FORWARD) and module.track_running_stats:
                return (
                    f"{name} keeps running means, which a second forward would count twice; use a norm without "
                    "them, such as group norm, or leave activation checkpointing out"
                )
    return None


_APPLY: Mapping[str, Callable[[RecomputeBlocks, nn.Module, Sequence[str]], None]] = {
    "full": RecomputeBlocks._each,
    "selective": RecomputeBlocks._each,
    "segments": RecomputeBlocks._segments,
    "budget": RecomputeBlocks._budget,
}
