"""A model that is cut over ranks: who holds which of its tensors, and what the whole is.

    rank 0    embedding, blocks.0        weights:   blocks.0 from rank 0, blocks.1 from rank 1, ... in the model's order
    rank 1    blocks.1, head             state:     each its own, and of the others that there is something elsewhere

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

Named = Iterator[tuple[str, "Tensor"]]
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True)
class Across:
    """Ranks that have the same samples, and each a part of every matrix.

    Attributes:
        alike: names of the parameters that each of them holds whole.
        partial: of these, whose gradient is the sum of all ranks'.
    """

    axis: Axis
    alike: frozenset[str]
    partial: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Spec:
    """Of a tensor that some rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pieces:
    """Args:
    model: this rank's piece.
    names: of the whole model's tensors, in its order.
    axis: the ranks that hold the other pieces.
    ends: the ranks with which `shared` parameters are shared.
    device: where collectives run.
    across: with whom matrices are divided; None: with nobody.
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
        across: Across | None = None,
    ) -> None:
        self._across = across
        self._names = list(names)
        self._axis = axis
        self._ends = ends
        self._device = device
        self._shared = frozenset(shared) if ends.size > 1 else frozenset()
        self._mine = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}

    @property
    def several(self) -> bool:
        return self._axis.size > 1

    def counts(self, name: str) -> bool:
        """Whether this rank is the one that counts a parameter that it holds."""
        if self._across is not None and name in self._across.alike and self._across.axis.rank > 0:
            return False
        return name not in self._shared or self._ends.rank == 0

    def add_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives both ends the sum of their gradients, and all ranks that of what each has a summand of; in place.

        Args:
            gradients: this rank's, by the names of the parameters.
        """
        for name in sorted(self._shared & gradients.keys()):
            self._ends.sum(gradients[name])
        if self._across is not None:
            for name in sorted(self._across.partial & gradients.keys()):
                self._across.axis.sum(gradients[name])

    def whole(self, pairs: Named, wanted: bool) -> Named:
        """All ranks' tensors in the order of the model. All ranks together.

        Args:
            pairs: this rank's, whole, in that order.
        """
        if not self.several:
            return pairs
        return self._whole(dict(pairs), wanted)

    def _whole(self, mine: dict[str, Tensor], wanted: bool) -> Named:
        specs = [_specs(one) for one in self._axis.gather({k: _Spec(tuple(v.shape), v.dtype) for k, v in mine.items()})]
        for name in self._names:
            holder = next((rank for rank, of_rank in enumerate(specs) if name in of_rank), None)
            if holder is None:
                continue
            spec = specs[holder][name]
            buffer = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            if holder == self._axis.rank:
                buffer.copy_(mine[name])
            self._axis.sum(bits(buffer))  # bits are added to zeros
            if wanted:
                yield name, buffer.cpu()

    def state(self, state: TrainingState) -> TrainingState:
        """This rank's, and of the others that they hold something. All ranks together.

        Raises:
            RunFailed: an optimizer's groups have come to differ.
        """
        if not self.several:
            return state
        told = {name: _Spec(tuple(one.shape), one.dtype) for name, one in state.tensors.items()}
        everywhere = cast("list[Any]", self._axis.gather((told, state.values)))
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

    def own(self, state: TrainingState) -> TrainingState:
        """What of a saved state belongs to this rank's piece."""
        if not self.several:
            return state
        tensors = {name: value for name, value in state.tensors.items() if self._parameter(name) in self._mine}
        optimizer = {name: value for name, value in state.values["optimizer"].items() if name in self._mine}
        return replace(state, tensors=tensors, values={**state.values, "optimizer": optimizer})

    def _parameter(self, key: str) -> str:
        """That an entry of the state belongs to."""
        if key.startswith(_OPTIMIZER):
            return key.removeprefix(_OPTIMIZER).partition(".")[2]
        return key.partition(".")[2]


def _specs(value: object) -> dict[str, _Spec]:
    return cast("dict[str, _Spec]", value)
