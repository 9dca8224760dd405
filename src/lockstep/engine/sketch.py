"""What the layers of a Sequential make of a batch, in shape and precision, without computing it.

    [8, 16] -> Linear -> [8, 64] -> ReLU -> [8, 64] -> Linear -> [8, 4]

For a model that hands on something else between each two of its layers; each rank keeps a sketch of all of them, whose
weights have shapes and no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from lockstep.core.records import Inputs


class Sketch:
    """Args:
    model: whole; it isn't changed.
    device: where it is to compute.
    """

    def __init__(self, model: nn.Sequential, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(one): self._like(one, device) for one in tensors}
        self._layers = list(copy.deepcopy(model, memo))

    def _like(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self._mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else empty

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> list[Tensor]:
        """Of each layer: tensors without values. In the autocast of the caller."""
        given = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs[0]
        found = []
        with self._mode:
            hidden = tree_map(lambda one: torch.empty_like(one) if isinstance(one, Tensor) else one, given)
            for layer in self._layers:
                hidden = layer(hidden)
                found.append(hidden)
        return found
