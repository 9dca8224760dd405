"""State that a block keeps from one forward to the next, and checks that recomputation doesn't change it.

    forward       mean 0.10 -> 0.19     the block's own running mean
    backward      mean 0.19 -> 0.27     computed again: counted twice, and from another mean --> ConfigError

Only a block's first forward is checked, and its second runs to the end (but see `StateGuard.stops_early`): afterwards a
guard costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError

from lockstep.core.errors import ConfigError, Problem

_KEY = "memory.activation_checkpointing"
_PLAIN = (bool, int, float, str, type(None))
_COUNTED = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_DEEPSPEED = re.compile(r"ds_\w+|applied_pre_backward_ref_cnt")
"""Attributes that DeepSpeed's stage 3 keeps in each module, for its hooks."""


class StateGuard:
    """Refuses blocks whose second forward would change the run.

    Attributes:
        shared: Whether the block was called a second time.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self.shared = False
        self._new = True
        self._slots: list[dict[str, nn.Parameter | None]] = []

    @property
    def stops_early(self) -> bool:
        """True if the second forward must end where the backward needs no more of it.

        DeepSpeed's stage 3 releases a module's parameters after its forward, also those that the backward, in which the
        second forward runs, has just gathered.
        """
        return any("ds_id" in vars(item) for block in self._blocks.values() for item in block.parameters())

    def begin(self) -> bool:
        """Begin a forward. Return whether it is checked: it is the first."""
        first, self._new = self._new, False
        if first:
            self._slots = [module._parameters for block in self._blocks.values() for module in block.modules()]
        self.shared = self.shared or not first
        return first

    def forward(self, inputs: Sequence[Any]) -> ChangedInputs:
        """Return the context of the forward; `inputs` are those from which the second one will begin."""
        tensors = [item for item in tree_leaves(inputs) if isinstance(item, Tensor) and not item.is_inference()]
        return ChangedInputs(next(iter(self._blocks)), [(tensor, tensor._version) for tensor in tensors])

    def weights(self) -> list[Tensor | None]:
        """Return the tensors that the blocks' modules now have as parameters."""
        return [weight for slots in self._slots for weight in slots.values()]

    def check_weights(self, before: Sequence[Tensor | None]) -> None:
        """Raise ConfigError if the modules don't have the same tensors as parameters as in the forward."""
        if any(now is not then for now, then in zip(self.weights(), before, strict=True)):
            names = ", ".join(self._blocks)
            raise _refusal(f"{names} is called with other tensors than its parameters (torch.func.functional_call)")

    def again(self) -> ChangedState:
        """Return the context of the second forward."""
        return ChangedState(self._blocks, self)


@dataclass(slots=True)
class ChangedInputs:
    """Raises ConfigError at its end if an input was written to."""

    block: str
    versions: list[tuple[Tensor, int]]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None and any(tensor._version != version for tensor, version in self.versions):
            raise _refusal(f"{self.block} writes to its input in place, from which it would be computed again")


class ChangedState:
    """Raises ConfigError at its end if the blocks' state has changed."""

    def __init__(self, blocks: Mapping[str, nn.Module], guard: StateGuard) -> None:
        self._blocks = blocks
        self._guard = guard
        self._shared = False  # a block that was called again since has overwritten the tensors of this call
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._shared = self._guard.shared
        self._before = state_of(self._blocks, tensors=not self._shared)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None and kind is not _StopRecomputationError:
            return
        changed = changes(self._before, state_of(self._blocks, tensors=not self._shared))
        self._before = {}
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise _refusal(f"{changed[0]}{more} changes with each forward, and a second one would count it twice")


def state_of(modules: Mapping[str, nn.Module], *, tensors: bool = True) -> dict[str, Any]:
    """Return the modules' state without their parameters, by name.

    It has buffers, and attributes that are tensors, plain values or collections (their lengths).

    Args:
        modules: By the prefix of their names.
        tensors: Whether to include attributes that are tensors.
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
