"""The list of a model's tensors, taken before it is sharded, to check saved and published weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from lockstep.core.adapters import Adapter, adapter_of
from lockstep.core.errors import RunFailed
from lockstep.core.formatting import listed
from lockstep.models.weight_matching import slots_of

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The parameters and saved buffers of a whole model; of one with an adapter, those that aren't of its base.

    Attributes:
        shapes: Shapes by name, in the model's order, tied ones once under their first name.
        tied: Other names of tied tensors -> first names.
        parameters: Names of parameters; a buffer may change its shape during training.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str]
    parameters: frozenset[str]
    adapter: Adapter | None = None

    def with_tied_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, which may be a part of the model's, under all of their names."""
        return {**tensors, **{other: tensors[first] for other, first in self.tied.items() if first in tensors}}

    def refuse_missing_names(self, names: Collection[str], what: str, expected: Collection[str] | None = None) -> None:
        """Raise RunFailed if `names`, which come from `what`, lack some of the expected tensors; None: of all."""
        missing = [name for name in (self.shapes if expected is None else expected) if name not in names]
        if missing:
            raise RunFailed(
                f"{what} lack {len(missing)} of the model's {len(self.shapes)} tensors: "
                f"{listed(missing, _SHOWN)}{_REPORT}"
            )

    def refuse_incomplete(self, shapes: Mapping[str, Shape], expected: Collection[str], what: str) -> None:
        """Raise RunFailed if tensors of these shapes lack an expected one, or have a parameter in another shape."""
        self.refuse_missing_names(shapes, what, expected)
        self._refuse_reshaped(shapes, what)

    def refuse_incomplete_file(self, shapes: Mapping[str, Shape], left_out: Collection[str], what: str) -> None:
        """Raise RunFailed if a published file, with tensors of these shapes, lacks some of the model's.

        The library that writes it may rename, split or join tensors (then the numbers of elements must be equal), and
        never writes those that are `left_out`.
        """
        names = {first: {first} for first in self.shapes}
        for other, first in self.tied.items():
            names[first].add(other)
        missing = [first for first, tied in names.items() if not tied & {*shapes, *left_out}]
        renamed = [name for name in shapes if name not in self.shapes and name not in self.tied]
        self._refuse_reshaped(shapes, what)
        num_missing = sum(prod(self.shapes[name]) for name in missing)
        num_renamed = sum(prod(shapes[name]) for name in renamed)
        if missing and num_missing != num_renamed:
            others = f", but {num_renamed:,} elements under other names" if renamed else ""
            raise RunFailed(
                f"{what} lack {len(missing)} of the model's {len(self.shapes)} tensors ({num_missing:,} elements"
                f"{others}): {listed(missing, _SHOWN)}{_REPORT}"
            )

    def _refuse_reshaped(self, shapes: Mapping[str, Shape], what: str) -> None:
        for name in self.parameters & shapes.keys():
            if shapes[name] != self.shapes[name]:
                raise RunFailed(f"{what} have {name} as {list(shapes[name])}, not {list(self.shapes[name])}{_REPORT}")


_REPORT = ". This is an error in Lockstep or in the model's code"


def model_tensors(model: nn.Module) -> ModelTensors:
    """Return the list of an unsharded model, which may be on the meta device."""
    adapter = adapter_of(model)
    slots = [slot for slot in slots_of(model) if adapter is None or slot.name not in adapter.frozen]
    parameters = {id(parameter) for parameter in model.parameters()}
    return ModelTensors(
        shapes={slot.name: tuple(slot.tensor.shape) for slot in slots},
        tied={other: slot.name for slot in slots for other in slot.names[1:]},
        parameters=frozenset(slot.name for slot in slots if id(slot.tensor) in parameters),
        adapter=adapter,
    )
