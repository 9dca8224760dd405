"""Shapes and dtypes of the outputs of a Sequential's layers, without computing them.

    [8, 16] -> Linear -> [8, 64] -> ReLU -> [8, 64] -> Linear -> [8, 4]

For a model whose layers return different shapes; each rank keeps all layers with fake weights, which take no memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map


class LayerShapes:
    """Shapes of the outputs of a Sequential's layers on a device. The model, which is whole, isn't changed."""

    def __init__(self, model: nn.Sequential, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(tensor): self._fake(tensor, device) for tensor in tensors}
        self._layers = list(copy.deepcopy(model, memo))

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self._mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else empty

    @torch.no_grad()
    def outputs(self, given: Any) -> list[Tensor]:
        """Return each layer's output for what the first is given, a tensor without values; in the caller's autocast."""
        outputs = []
        with self._mode:
            hidden = tree_map(_empty_like, given)
            for layer in self._layers:
                hidden = layer(hidden)
                outputs.append(hidden)
        return outputs


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
