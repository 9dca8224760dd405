"""The part of each trained parameter on this rank, as a plain parameter for an optimizer.

model     weight: DTensor [8, 4] ----.
here      rows 4-7: [4, 4]       <---'  the same memory        optimizer -> moments [4, 4]
outside   moments: DTensor [8, 4]; this rank holds rows 4-7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lockstep.distributed.shard_boxes import ShardLike, as_shard_of, is_sharded, local_tensor, shard_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ParameterShard:
    """The part `local` of one parameter that this rank holds: a plain parameter on the memory of the model's, `whole`.

    Args:
        keeps_dtensors: Whether the optimizer works on the DTensor itself.
        factors: Entries of the optimizer's state that have one element along a dim of a matrix: that dim, from the end.
    """

    def __init__(
        self, name: str, whole: nn.Parameter, keeps_dtensors: bool = False, factors: Mapping[str, int] | None = None
    ) -> None:
        self.name = name
        self.whole = whole
        self.local = nn.Parameter(local_tensor(whole))
        self._keeps_dtensors = keeps_dtensors
        self._placements = cast("DTensor", whole).placements if is_sharded(whole) else None
        self._factors = {} if factors is None or whole.ndim < 2 else factors
        self._factors_like: dict[str, Tensor] = {}

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of this rank's part; None: there is none. If it is partial, ranks sum it: all together.

        To be read without autograd, where `to_local` is an operation of its own (40 us).
        """
        grad, wanted = self.whole.grad, self._placements
        if wanted is None or grad is None:
            return grad
        sharded = cast("DTensor", grad)
        if sharded.placements is not wanted and sharded.placements != wanted:
            self.whole.grad = sharded = sharded.redistribute(placements=wanted)
        return sharded.to_local()

    def as_shard(self, entry: str, value: Tensor) -> Tensor | ShardLike:
        """Return optimizer state of this part as a shard of the whole tensor's."""
        if not is_sharded(self.whole) or is_sharded(value):
            return value
        if entry in self._factors:
            return ShardLike(value, self._like(entry)) if self._is_sharded_factor(entry) else value
        return ShardLike(value, self.whole) if self._is_elementwise(value) else value

    def as_local(self, entry: str, value: Tensor) -> Tensor:
        """Return saved optimizer state, of this part or the whole tensor, in the optimizer's form."""
        if entry in self._factors:
            if not self._is_sharded_factor(entry) or value.shape == local_tensor(self._like(entry)).shape:
                return value
            return shard_of(self._like(entry), value)
        if value.shape == self.whole.shape and not self._is_elementwise(value):
            value = shard_of(self.whole, value)
        if self._keeps_dtensors and self._is_elementwise(value):
            return as_shard_of(self.whole, value.to(self.local.device))
        return value

    def _is_sharded_factor(self, entry: str) -> bool:
        """Return whether ranks hold parts of a factor; it is whole if its one element is along the sharded dim."""
        return is_sharded(self.whole) and self.whole.ndim + self._factors[entry] > 0

    def _like(self, entry: str) -> Tensor:
        if entry not in self._factors_like:
            self._factors_like[entry] = self.whole.detach().narrow(self._factors[entry], 0, 1)
        return self._factors_like[entry]

    def _is_elementwise(self, value: Tensor) -> bool:
        return value.ndim > 0 and value.shape == self.local.shape


class LocalGradients:
    """The gradients of this rank's parts, read once for each update."""

    def __init__(self, shards: Sequence[ParameterShard]) -> None:
        self._shards = shards
        self._known: list[Tensor | None] | None = None

    def clear(self) -> None:
        """Forget them: a backward changes them."""
        self._known = None

    def read(self) -> dict[str, Tensor]:
        """Return those that exist, by the names of parameters. If some are partial: all ranks together."""
        pairs = zip(self._shards, self._read(), strict=True)
        return {shard.name: gradient for shard, gradient in pairs if gradient is not None}

    def move(self) -> None:
        """Move them from the model's parameters to the optimizer's."""
        for shard, gradient in zip(self._shards, self._read(), strict=True):
            if gradient is not None:
                shard.local.grad, shard.whole.grad = gradient, None
        self._known = None

    @torch.no_grad()
    def _read(self) -> list[Tensor | None]:
        if self._known is None:
            self._known = [shard.gradient for shard in self._shards]
        return self._known


def parameter_shards(
    model: nn.Module, keeps_dtensors: bool = False, factors: Mapping[str, int] | None = None
) -> list[ParameterShard]:
    """Return the shards of the trained parameters in the order of the model, tied ones once."""
    return [
        ParameterShard(name, parameter, keeps_dtensors, factors)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
