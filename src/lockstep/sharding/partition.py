"""The partition of a model over ranks: which rank holds which tensors, and how the whole model is gathered.

    rank 0    embedding, blocks.0        weights:   blocks.0 from rank 0, blocks.1 from rank 1, ... in the model's order
    rank 1    blocks.1, head             state:     each its own, and empty shards of tensors that other ranks hold

Names are those of the whole model on every rank. A tensor that the first and the last stage share is held by two
ranks; its gradient is the sum of both ranks', and counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import FlatShard, bits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis
    from lockstep.distributed.mesh_position import TensorParallelGroup

_Spec = tuple[tuple[int, ...], "torch.dtype"]
"""Shape and dtype of a tensor."""


class ModelPartition:
    """The partition of a model over ranks.

    Args:
        model: This rank's part.
        names: The whole model's tensors, in its order.
        axis: The ranks that hold the other stages.
        shared: Names of the parameters that the first and the last stage share.
        ends: The ranks that hold `shared`.
        device: The device on which collectives run.
        tensor_group: The ranks over which matrices are sharded; None: they are whole.
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
        self._own = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}

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

    def reduce_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum, in place, the gradients of parameters that both ends hold, or that are partial in the tensor group.

        Args:
            gradients: This rank's, by the names of parameters.
        """
        for name in sorted(self._shared & gradients.keys()):
            self._ends.sum(gradients[name])
        if self._tensor_group is not None:
            for name in sorted(self._tensor_group.partial & gradients.keys()):
                self._tensor_group.axis.sum(gradients[name])

    def whole(self, own: Mapping[str, Tensor], wanted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield all ranks' tensors in the order of the model. All ranks together.

        Args:
            own: This rank's, whole.
            wanted: Whether this rank yields them.
        """
        specs = cast("list[dict[str, _Spec]]", self._axis.gather(_specs(own)))
        for name in self._names:
            holder = next((rank for rank, specs_of_rank in enumerate(specs) if name in specs_of_rank), None)
            if holder is None:
                continue
            shape, dtype = specs[holder][name]
            buffer = torch.zeros(shape, dtype=dtype, device=self._device)
            if holder == self._axis.rank:
                buffer.copy_(own[name])
            self._axis.sum(bits(buffer))  # integers, to which zeros are added
            if wanted:
                yield name, buffer.cpu()

    def gather_state(self, state: TrainingState) -> TrainingState:
        """Return this rank's state with an empty shard for each tensor that others hold. All ranks together.

        Raises:
            RunFailed: The optimizer's groups differ between ranks.
        """
        if not self.is_divided:
            return state
        everywhere = cast("list[Any]", self._axis.gather((_specs(state.tensors), state.values)))
        tensors: dict[str, Any] = dict(state.tensors)
        values: dict[str, Any] = {"optimizer": {}, "groups": state.values["groups"], "tied": {}}
        if any(of_rank["groups"] != state.values["groups"] for _, of_rank in everywhere):
            raise RunFailed(
                "the optimizer keeps a value in its groups that differs between the stages of the pipeline, since each "
                "has seen its own gradients alone: it can't be saved, and the run isn't the single process's; use "
                "another strategy"
            )
        for specs, of_rank in everywhere:
            for name, (shape, dtype) in specs.items():
                if name not in tensors:
                    tensors[name] = FlatShard(torch.empty(0, dtype=dtype), 0, shape)
            values["optimizer"].update(of_rank["optimizer"])
            values["tied"].update(of_rank["tied"])
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


def _specs(tensors: Mapping[str, Any]) -> dict[str, _Spec]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
