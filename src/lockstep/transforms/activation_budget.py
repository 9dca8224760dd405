"""The blocks that a memory budget keeps: as many as fit, the last ones first, since the backward frees them first.

    measured, in the first forward     b0 40 MB   b1 40 MB   b2 40 MB   b3 40 MB      inputs 2 MB each
    budget 0.5 of 160 MB               again      again      again      kept          3 x 2 + 40 <= 80, 2 x 2 + 80 > 80

To measure, each block runs once more in the first forward, and the memory that it would hold is counted and freed:
there is never more than one block's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lockstep.transforms.block_state import StateGuard
from lockstep.transforms.recomputing import Recompute, replace_forward

Broadcast = Callable[[object], object]
"""Returns the first rank's value on all ranks. All ranks together."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes that a block holds between forward and backward: all, and those of its inputs."""

    all: int
    inputs: int


def choose(held: Mapping[str, BlockMemory], share: float) -> frozenset[str]:
    """Return the names of the blocks to keep, so that they and the inputs of the others are at most `share` of all."""
    free = share * sum(memory.all for memory in held.values()) - sum(memory.inputs for memory in held.values())
    kept = []
    for name, memory in reversed(list(held.items())):
        free -= memory.all - memory.inputs
        if free < 0:
            break
        kept.append(name)
    return frozenset(kept)


class Budget:
    """Replaces the forwards of blocks, and decides in the second forward which of them are computed again."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], share: float, recompute: Recompute, broadcast: Broadcast
    ) -> None:
        self._kept: frozenset[str] | None = None  # None: not decided yet
        self._share = share
        self._recompute = recompute
        self._broadcast = broadcast
        self._held: dict[str, BlockMemory] = {}
        for name in names:
            block = model.get_submodule(name)
            replace_forward(block, partial(self._call, name, block, StateGuard({name: block}), block.forward))

    def _call(
        self, name: str, block: nn.Module, guard: StateGuard, forward: Callable[..., Any], *inputs: Any, **named: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        if self._kept is None and name in self._held:  # the second forward has begun
            self._kept = cast("frozenset[str]", self._broadcast(choose(self._held, self._share)))
        if self._kept is None:
            self._held[name] = self._measured(block, forward, inputs, named)
        elif name in self._kept:
            return forward(*inputs, **named)
        return self._recompute(guard, forward, *inputs, **named)

    def _measured(
        self, block: nn.Module, forward: Callable[..., Any], inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> BlockMemory:
        weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
        sizes: dict[int, int] = {}

        def measure(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                sizes[storage._cdata] = storage.nbytes()
            return tensor.detach()  # an output that its own node saves would never be freed

        tensors = [tensor for tensor in tree_leaves((inputs, named)) if isinstance(tensor, Tensor)]
        with torch.random.fork_rng(), self._recompute.muted(), saved_tensors_hooks(measure, lambda kept: kept):
            outputs = forward(*inputs, **named)
        del outputs
        own_input = tensors[0].untyped_storage().nbytes() if tensors else 0  # other blocks hold the further inputs, too
        inputs_held = {tensor.untyped_storage()._cdata for tensor in tensors}
        made = sum(size for pointer, size in sizes.items() if pointer not in inputs_held)
        return BlockMemory(made + own_input, own_input)
