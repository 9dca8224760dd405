"""The partition of a model over ranks: which rank holds which tensors, and how the whole model is gathered.

Names are the whole model's on every rank. A tensor that the first and the last stage share is held by two
ranks; its gradient is the sum of both ranks', and counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import FlatShard, bits, full_tensor, is_sharded
from lockstep.sharding.buckets import sum_in_buckets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis
    from lockstep.distributed.mesh_position import TensorParallelGroup

Spec = tuple[tuple[int, ...], "torch.dtype"]
"""Shape and dtype of a tensor."""


class ModelPartition:
    """The partition of a model over ranks.

    Args:
        model: This rank's part.
        names: The whole model's tensors, in its order.
        axis: The ranks that hold the other stages.
        shared: Names of the parameters that the first and the last stage share.
        ends: The ranks that hold `shared`.
        tensor_group: The ranks that hold shards of the matrices; None: they are whole.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        axis: Axis,
        *,
        shared: Iterable[str] = (),
        ends: Axis,
        device: torch.device,
        tensor_group: TensorParallelGroup | None = None,
    ) -> None:
        self._tensor_group = tensor_group
        self._names = list(names)
        self._axis = axis
        self._ends = ends
        self._device = device
        self._shared = frozenset(shared) if ends.size > 1 else frozenset()
        self._partial = frozenset() if tensor_group is None else tensor_group.partial
        self._own = {*dict(model.named_parameters()), *dict(model.named_buffers()), *model.state_dict()}

    @property
    def is_divided(self) -> bool:
        """True if other ranks hold other stages."""
        return self._axis.size > 1

    def counts(self, name: str) -> bool:
        """Return whether this rank is the one that counts a parameter that several ranks hold."""
        group = self._tensor_group
        if group is not None and name in group.replicated and group.axis.rank > 0:
            return False
        return name not in self._shared or self._ends.rank == 0

    def counted(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients that this rank counts, of this rank's by name."""
        if not self._shared and self._tensor_group is None:
            return list(gradients.values())
        return [gradient for name, gradient in gradients.items() if self.counts(name)]

    def sums(self, name: str) -> bool:
        """Return whether `reduce_shared` sums the gradient of this parameter."""
        return name in self._shared or name in self._partial

    @property
    def sums_gradients(self) -> bool:
        """True if `reduce_shared` has gradients to sum."""
        return bool(self._shared or self._partial)

    def reduce_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum, in place, this rank's gradients of shared parameters, and of those partial in the tensor group."""
        shared = [gradients[name] for name in sorted(self._shared & gradients.keys())]
        sum_in_buckets(shared, self._ends, self._device)
        if self._tensor_group is not None:
            partial = [gradients[name] for name in sorted(self._partial & gradients.keys())]
            sum_in_buckets(partial, self._tensor_group.axis, self._device)

    @torch.no_grad()
    def whole(
        self, own: Mapping[str, Tensor], wanted: bool | Callable[[str], bool], names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all ranks' tensors (`own` are this rank's), one at a time, as `ModelState.weights` does.

        All ranks together.
        """
        specs = cast("list[dict[str, Spec]]", self._axis.gather(specs_of(own)))
        for name in self._names if names is None else names:
            holder = next((rank for rank, specs_of_rank in enumerate(specs) if name in specs_of_rank), None)
            if holder is None:
                continue
            shape, dtype = specs[holder][name]
            buffer = torch.zeros(shape, dtype=dtype, device=self._device)
            if holder == self._axis.rank:
                buffer.copy_(full_tensor(own[name]) if is_sharded(own[name]) else own[name])
            self._axis.sum(bits(buffer))  # integers; zeros are added to them
            if wanted if isinstance(wanted, bool) else wanted(name):
                yield name, buffer.cpu()

    def specs(self, own: Mapping[str, Spec]) -> dict[str, Spec]:
        """Return shapes and dtypes of all ranks' tensors, given this rank's. All ranks together."""
        everywhere = cast("list[dict[str, Spec]]", self._axis.gather(own))
        specs = {name: spec for of_rank in reversed(everywhere) for name, spec in of_rank.items()}
        return {name: specs[name] for name in self._names if name in specs}

    def gather_state(self, state: TrainingState) -> TrainingState:
        """Return this rank's state with an empty shard for each tensor that others hold. All ranks together."""
        if not self.is_divided:
            return state
        everywhere = cast("list[Any]", self._axis.gather((specs_of(state.tensors), state.values)))
        tensors: dict[str, Any] = dict(state.tensors)
        values: dict[str, Any] = {"optimizer": {}, "groups": state.values["groups"], "tied": {}}
        own = state.values.get("own")
        alike = [state.values["groups"], own]
        if any([of_rank["groups"], of_rank.get("own")] != alike for _, of_rank in everywhere):
            raise RunFailed(
                "the optimizer keeps a value in its groups, or for all parameters, that differs between the stages of "
                "the pipeline, since each has seen only its own gradients: it can't be saved, and the run isn't the "
                "single process's; use another strategy"
            )
        if own:
            values["own"] = own
        recast: list[str] = []
        for specs, of_rank in everywhere:
            for name, (shape, dtype) in specs.items():
                if name not in tensors:
                    tensors[name] = FlatShard(torch.empty(0, dtype=dtype), 0, shape)
            values["optimizer"].update(of_rank["optimizer"])
            values["tied"].update(of_rank["tied"])
            recast += of_rank.get("recast", ())
        if recast:
            values["recast"] = sorted({*recast})
        return replace(state, tensors=tensors, values=values)

    def own_state(self, state: TrainingState) -> TrainingState:
        """Return the part of a saved state that belongs to this rank's part of the model."""
        if not self.is_divided:
            return state
        tensors = {
            key: value
            for key, value in state.tensors.items()
            if key.split(".", 2 if key.startswith("optimizer.") else 1)[-1] in self._own
        }
        optimizer = {name: value for name, value in state.values["optimizer"].items() if name in self._own}
        return replace(state, tensors=tensors, values={**state.values, "optimizer": optimizer})


def specs_of(tensors: Mapping[str, Any]) -> dict[str, Spec]:
    """Return shape and dtype of each tensor, whole."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
