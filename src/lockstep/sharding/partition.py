"""A model that is divided over ranks by stages: which rank holds which tensors, and how the whole is put together.

    rank 0    embedding, blocks.0        weights:   blocks.0 from rank 0, blocks.1 from rank 1, ... in the model's order
    rank 1    blocks.1, head             state:     each its own, and empty shards for what other ranks hold

Names are those of the whole model on every rank. Tensors that two ranks hold, since the first and the last stage share
them, have the sum of both gradients, and count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import FlatShard, bits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis
    from lockstep.distributed.mesh_position import TensorParallelGroup

Named = Iterator[tuple[str, "Tensor"]]
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that some rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelPartition:
    """The division of a model over ranks.

    Args:
        model: This rank's part.
        names: The whole model's tensors, in its order.
        axis: The ranks that hold the other stages.
        shared: Names of the parameters that the first and the last stage share.
        ends: The ranks that hold `shared`.
        device: Where collectives run.
        tensor_group: The ranks over which matrices are divided; None: they are whole.
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
        """Sum, in place, the gradients of what both ends hold, and of what each rank of a tensor group has an addend
        of.

        Args:
            gradients: This rank's, by the names of parameters.
        """
        for name in sorted(self._shared & gradients.keys()):
            self._ends.sum(gradients[name])
        if self._tensor_group is not None:
            for name in sorted(self._tensor_group.partial & gradients.keys()):
                self._tensor_group.axis.sum(gradients[name])

    def whole(self, own: Mapping[str, Tensor], wanted: bool) -> Named:
        """Yield all ranks' tensors in the order of the model. All ranks together.

        Args:
            own: This rank's, whole.
            wanted: Whether this rank yields them.
        """
        own_specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in own.items()}
        specs = cast("list[dict[str, TensorSpec]]", self._axis.gather(own_specs))
        for name in self._names:
            holder = next((rank for rank, of_rank in enumerate(specs) if name in of_rank), None)
            if holder is None:
                continue
            spec = specs[holder][name]
            buffer = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            if holder == self._axis.rank:
                buffer.copy_(own[name])
            self._axis.sum(bits(buffer))  # bits are added to zeros
            if wanted:
                yield name, buffer.cpu()

    def gather_state(self, state: TrainingState) -> TrainingState:
        """Return this rank's state with an empty shard for each tensor that others hold. All ranks together.

        Raises:
            RunFailed: The optimizer's groups differ between ranks.
        """
        if not self.is_divided:
            return state
        own_specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in state.tensors.items()}
        everywhere = cast("list[Any]", self._axis.gather((own_specs, state.values)))
        tensors: dict[str, Any] = dict(state.tensors)
        values: dict[str, Any] = {"optimizer": {}, "groups": state.values["groups"], "tied": {}}
        if any(of_rank["groups"] != state.values["groups"] for _, of_rank in everywhere):
            raise RunFailed(
                "the optimizer keeps something in its groups that differs between the stages of the pipeline, each of "
                "which has seen its own gradients alone: it can't be saved, nor is this the single process's run; take "
                "another strategy"
            )
        for specs, of_rank in everywhere:
            for name, spec in specs.items():
                if name not in tensors:
                    tensors[name] = FlatShard(torch.empty(0, dtype=spec.dtype), 0, spec.shape)
            values["optimizer"].update(of_rank["optimizer"])
            values["tied"].update(of_rank["tied"])
        return replace(state, tensors=tensors, values=values)

    def own_state(self, state: TrainingState) -> TrainingState:
        """Return what of a saved state belongs to this rank's part."""
        if not self.is_divided:
            return state

        def parameter(key: str) -> str:
            kind, _, rest = key.partition(".")
            return rest.partition(".")[2] if f"{kind}." == _OPTIMIZER else rest

        tensors = {key: value for key, value in state.tensors.items() if parameter(key) in self._own}
        optimizer = {name: value for name, value in state.values["optimizer"].items() if name in self._own}
        return replace(state, tensors=tensors, values={**state.values, "optimizer": optimizer})
