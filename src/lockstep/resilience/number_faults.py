"""Faults in the numbers of a run: a NaN that doesn't come again, and a bit that flips in one rank's memory.

nan        the first layer's next output in training is NaN, once     --> `recovery.bad_numbers.nonfinite: retry`
diverge    a bit of a parameter is another one on this rank alone     --> `recovery.compare_every`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.distributed.shard_boxes import live_part

if TYPE_CHECKING:
    from torch import Tensor, nn

_NAN = float("nan")
_BIT = 1 << 20  # of a float32: an eighth of the number, as its exponent stays


def make_nan(model: nn.Module) -> None:
    """Let the next output of the first layer in training be NaN."""
    first = next(module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)

    def spoil(module: nn.Module, inputs: object, output: Any) -> Any:
        if not module.training:
            return None
        handle.remove()
        return (output[0] * _NAN, *output[1:]) if isinstance(output, tuple) else output * _NAN

    handle = first.register_forward_hook(spoil)


def flip_bit(model: nn.Module) -> None:
    """Flip a bit of the largest trained parameter that this rank holds."""
    import torch

    held = [live_part(parameter).data for parameter in model.parameters() if parameter.requires_grad]
    largest: Tensor = max(held, key=lambda tensor: tensor.numel())
    numbers = largest.view(-1)[:1].float().view(torch.int32) ^ _BIT
    largest.view(-1)[:1] = numbers.view(torch.float32).to(largest.dtype)


NUMBER_FAULTS: Mapping[str, Callable[[nn.Module], None]] = {"nan": make_nan, "diverge": flip_bit}
