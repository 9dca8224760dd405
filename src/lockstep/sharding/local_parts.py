"""Of each trained parameter what this rank holds, as a plain parameter: what an optimizer works on.

    model     weight: DTensor [8, 4] ----.
    here      rows 4-7: [4, 4]       <---'  the same memory        optimizer -> moments [4, 4]
    outside   moments: DTensor [8, 4], of which this rank holds rows 4-7

An elementwise rule doesn't notice, and its kernels are those of the single process. A parameter that isn't divided is
held whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from lockstep.distributed.shard_boxes import as_shard_of, is_sharded, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Part:
    """Attributes:
    whole: the model's parameter.
    local: this rank's part of it.
    """

    def __init__(self, name: str, whole: nn.Parameter) -> None:
        self.name = name
        self.whole = whole
        self.local = nn.Parameter(local_tensor(whole))

    @property
    def gradient(self) -> Tensor:
        """This rank's part of it; of a gradient of which each rank has a summand, all ranks together."""
        grad: Tensor = cast("Tensor", self.whole.grad)
        if not is_sharded(self.whole):
            return grad
        wanted, found = cast("DTensor", self.whole).placements, cast("DTensor", grad)
        if found.placements != wanted:
            self.whole.grad = found = found.redistribute(placements=wanted)
        return found.to_local()

    def hand_over(self) -> None:
        """The gradient, from the model's parameter to the optimizer's."""
        if self.whole.grad is not None:
            self.local.grad, self.whole.grad = self.gradient, None

    def is_like(self, value: Tensor) -> bool:
        """Whether it has an element for each of this part's."""
        return value.ndim > 0 and value.shape == self.local.shape

    def shown(self, value: Tensor) -> Tensor:
        """Optimizer state of this part, as a part of what it is a part of."""
        return self.as_whole(value) if not is_sharded(value) and self.is_like(value) else value

    def cut(self, value: Tensor) -> Tensor:
        """This part of a tensor of the whole's shape."""
        if not is_sharded(self.whole):
            return value
        chunk = cast("Any", self.whole).__create_chunk_list__()[0]
        return value[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]

    def fit(self, value: Tensor) -> Tensor:
        """Saved optimizer state, as this part's."""
        return self.cut(value) if value.shape == self.whole.shape and not self.is_like(value) else value

    def as_whole(self, value: Tensor) -> Tensor:
        """What belongs to this part, as what it is a part of."""
        return as_shard_of(self.whole, value)


def trained_parts(model: nn.Module) -> list[Part]:
    """In the order of the model, tied ones once."""
    return [Part(name, one) for name, one in model.named_parameters() if one.requires_grad]
