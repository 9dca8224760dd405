"""A transform: the inputs of each nn.Linear are rounded to a few bits, so that a model learns to run quantized.

In Python:  lockstep.train(config, transforms=[QuantizedInputs(bits=6)], ...)
In YAML:    transforms: [{target: own_transform.py:QuantizedInputs, arguments: {bits: 6}}]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lockstep


class QuantizedInputs(lockstep.extend.Transform):
    name = "quantized-inputs"  # other transforms name it in `after` and `before`

    def __init__(self, bits: int = 8) -> None:
        self.levels = 2 ** (bits - 1) - 1

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return None if self._layers(model) else "the model has no nn.Linear"

    def apply(self, model: nn.Module) -> nn.Module:
        for layer in self._layers(model):
            layer.register_forward_pre_hook(self._round)
        return model

    def _layers(self, model: nn.Module) -> list[nn.Linear]:
        return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]

    def _round(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = inputs[0].detach().abs().amax(-1, keepdim=True).clamp(min=1e-8) / self.levels
        rounded = (inputs[0] / scale).round() * scale
        return (inputs[0] + (rounded - inputs[0]).detach(), *inputs[1:])  # the gradient ignores the rounding
