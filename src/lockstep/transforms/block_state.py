"""Refuses blocks that recomputation would change: a running mean would be counted twice.

Only a block's first forward is checked, and its second runs to the end (but see `StateGuard.stops_early`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.shard_boxes import is_sharded

_KEY = "memory.activation_checkpointing"
_PLAIN = (bool, int, float, str, type(None))
_COUNTED = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_DEEPSPEED = re.compile(r"ds_\w+|applied_pre_backward_ref_cnt")
"""Attributes that DeepSpeed's stage 3 keeps in each module, for its hooks."""


class StateGuard:
    """Refuses a block if its second forward would change the run."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name = name
        self._block = block
        self._calls = 0
        self._slots: list[dict[str, nn.Parameter | None]] = []

    @property
    def stops_early(self) -> bool:
        """True if the second forward must end where the backward needs no more of it.

        DeepSpeed's stage 3 releases a module's parameters after its forward, also those that the backward has just
        gathered around its second forward.
        """
        return any("ds_id" in vars(parameter) for parameter in self._block.parameters())

    def begin(self) -> bool:
        """Begin a forward. Return whether it is checked: it is the first."""
        self._calls = min(self._calls + 1, 2)  # torch.compile compiles again for each other number
        if self._calls == 1:
            self._slots = [module._parameters for module in self._block.modules()]
        return self._calls == 1

    @contextmanager
    def forward(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Raise ConfigError if the forward writes to `inputs`, where the second one will begin."""
        tensors = [item for item in tree_leaves(inputs) if isinstance(item, Tensor) and not item.is_inference()]
        versions = [tensor._version for tensor in tensors]
        yield
        if [tensor._version for tensor in tensors] != versions:
            raise _refusal(f"{self._name} writes to its input in place, but it would be computed again from that")

    def weights(self) -> list[Tensor | None]:
        """Return the tensors that the block's modules now have as parameters."""
        return [weight for slots in self._slots for weight in slots.values()]

    def check_weights(self, before: Sequence[Tensor | None]) -> None:
        """Raise ConfigError if the modules don't have the same tensors as parameters as in the forward.

        FSDP's own exchange of a unit's shards for whole parameters, and back, aside.
        """
        pairs = [(now, then) for now, then in zip(self.weights(), before, strict=True) if now is not then]
        if any(is_sharded(now) == is_sharded(then) for now, then in pairs):
            raise _refusal(
                f"{self._name} is called with other tensors than its parameters (torch.func.functional_call)"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Raise ConfigError if the second forward changes the block's state."""
        tensors = self._calls == 1  # else a later call has overwritten the tensors of this one
        before = state_of({self._name: self._block}, tensors=tensors)
        try:
            yield
        except _StopRecomputationError:
            self._compare(before, tensors=tensors)
            raise
        self._compare(before, tensors=tensors)

    def _compare(self, before: Mapping[str, Any], *, tensors: bool) -> None:
        changed = changes(before, state_of({self._name: self._block}, tensors=tensors))
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise _refusal(f"{changed[0]}{more} changes with each forward, and a second one would count it twice")


def state_of(modules: Mapping[str, nn.Module], *, tensors: bool = True) -> dict[str, Any]:
    """Return the state of modules (by the prefix of their names) without their parameters, by name.

    It has buffers, and attributes that are tensors (if wanted), plain values or collections (their lengths).
    """
    state: dict[str, Any] = {}
    for prefix, block in modules.items():
        for path, module in block.named_modules(prefix=prefix):
            kept = {**module._buffers, **_attributes(module, tensors=tensors)}
            state.update((f"{path}.{name}".lstrip("."), _copy(value)) for name, value in kept.items())
    return state


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the state that has changed."""
    return [name for name, value in now.items() if not _equal(value, before.get(name))]


def _attributes(module: nn.Module, *, tensors: bool) -> dict[str, Any]:
    kinds = (*_PLAIN, *_COUNTED, *((Tensor,) if tensors else ()))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, kinds) and name not in _OF_TORCH and not _OF_DEEPSPEED.fullmatch(name)
    }


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, or the length of a collection, which shows whether forwards append to it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return len(value) if isinstance(value, _COUNTED) else value


def _equal(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other) and (value == other or value != value)
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return bool(torch.all((value == other) | ((value != value) & (other != other))))


def _refusal(what: str) -> ConfigError:
    remedy = (
        "use blocks that keep nothing from one forward to the next, name other blocks "
        f"({_KEY}.modules; in Python blocks=[...]), or leave activation checkpointing out"
    )
    return ConfigError(Problem("", _KEY, f"{what}; {remedy}"))
