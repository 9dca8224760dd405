"""The part of each trained parameter that this rank holds, as a plain parameter, on which an optimizer works.

    model     weight: DTensor [8, 4] ----.
    here      rows 4-7: [4, 4]       <---'  the same memory        optimizer -> moments [4, 4]
    outside   moments: DTensor [8, 4], of which this rank holds rows 4-7

An elementwise optimizer makes the same update, with the kernels of the single process. A parameter that isn't sharded
is held whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from lockstep.distributed.shard_boxes import as_shard_of, is_sharded, local_tensor, shard_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ParameterShard:
    """The part of one parameter that this rank holds.

    Args:
        keeps_dtensors: Whether the optimizer works on the DTensor itself.

    Attributes:
        whole: The model's parameter.
        local: This rank's part of it, a plain parameter on the same memory.
    """

    def __init__(self, name: str, whole: nn.Parameter, keeps_dtensors: bool) -> None:
        self.name = name
        self.whole = whole
        self.local = nn.Parameter(local_tensor(whole))
        self._keeps_dtensors = keeps_dtensors

    @property
    def gradient(self) -> Tensor:
        """The gradient of this rank's part. If it is partial, ranks sum it: all together."""
        grad: Tensor = cast("Tensor", self.whole.grad)
        if not is_sharded(self.whole):
            return grad
        wanted, sharded = cast("DTensor", self.whole).placements, cast("DTensor", grad)
        if sharded.placements != wanted:
            self.whole.grad = sharded = sharded.redistribute(placements=wanted)
        return sharded.to_local()

    def move_gradient(self) -> None:
        """Move the gradient from the model's parameter to the optimizer's."""
        if self.whole.grad is not None:
            self.local.grad, self.whole.grad = self.gradient, None

    def as_shard(self, value: Tensor) -> Tensor:
        """Return optimizer state of this part as a shard of the whole tensor's."""
        return as_shard_of(self.whole, value) if not is_sharded(value) and self._is_elementwise(value) else value

    def as_local(self, value: Tensor) -> Tensor:
        """Return saved optimizer state, of this part or the whole tensor, in the optimizer's form."""
        if value.shape == self.whole.shape and not self._is_elementwise(value):
            value = shard_of(self.whole, value)
        if self._keeps_dtensors and self._is_elementwise(value):
            return as_shard_of(self.whole, value.to(self.local.device))
        return value

    def _is_elementwise(self, value: Tensor) -> bool:
        """Return whether `value` has an element for each of this part's."""
        return value.ndim > 0 and value.shape == self.local.shape


def parameter_shards(model: nn.Module, keeps_dtensors: bool = False) -> list[ParameterShard]:
    """Return the shards of the trained parameters in the order of the model, tied ones once."""
    return [
        ParameterShard(name, parameter, keeps_dtensors)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
