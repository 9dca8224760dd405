"""Faults in the numbers of a run: a NaN in the output of the first layer, a bit of a parameter that flips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from lockstep.distributed.shard_boxes import live_part

if TYPE_CHECKING:
    from torch import Tensor, nn

NAN, DIVERGE = "nan", "diverge"
_NAN = float("nan")
_BIT = 1 << 20  # of a float32: an eighth of the number, as its exponent stays


def make_nan(model: nn.Module, fired: Callable[[], None]) -> None:
    """Let the next output in training of the first layer that is called be NaN, and call `fired` then."""

    def spoil(module: nn.Module, inputs: object, output: Any) -> Any:
        if not module.training:
            return None
        for handle in handles:
            handle.remove()
        fired()
        return _spoiled(output)

    handles = [layer.register_forward_hook(spoil) for layer in _layers(model)]


def _spoiled(output: Any) -> Any:
    import torch

    if isinstance(output, MutableMapping):
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output[name] = value * _NAN
        return output
    return (output[0] * _NAN, *output[1:]) if isinstance(output, tuple) else output * _NAN


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that may be the first layer: those with parameters of their own, and the whole."""
    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    return [*layers, model] if model not in layers else layers


def flip_bit(model: nn.Module, fired: Callable[[], None]) -> None:
    """Flip a bit of the largest trained parameter that this rank holds, and call `fired`."""
    import torch

    held = [live_part(parameter).data for parameter in model.parameters() if parameter.requires_grad]
    largest: Tensor = max(held, key=lambda tensor: tensor.numel())
    if not largest.numel():
        return
    numbers = largest.view(-1)[:1].float().view(torch.int32) ^ _BIT
    largest.view(-1)[:1] = numbers.view(torch.float32).to(largest.dtype)
    fired()


NUMBER_FAULTS: Mapping[str, Callable[[nn.Module, Callable[[], None]], None]] = {NAN: make_nan, DIVERGE: flip_bit}
