"""Tensor parallelism: each matrix is divided over the ranks of a group, which have the same samples.

              x (on both)       colwise            rowwise
    rank 0    x  ---------->   x W1[:half]'  -->   h0 W2[:, :half]'  --.
    rank 1    x  ---------->   x W1[half:]'  -->   h1 W2[:, half:]'  --+--> sum: the same on both again

(Shoeybi et al. 2019, arXiv:1909.08053.) By sequence, the sum leaves each rank with its own positions, on which norms
and dropout work, and what the next colwise matrix takes is put together again (Korthikanti et al. 2022,
arXiv:2205.05198).

Divided parameters are DTensors on the tensor axis, under their own names; all others stay whole on each rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep.transforms.tensor_experts import divide_experts
from lockstep.transforms.undivided import Undivided

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE = Shard(1)  # [samples, positions, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """How the parameters of a model lie on the ranks of a tensor group.

    Attributes:
        alike: names of those that each rank holds whole.
        partial: of these, whose gradient is the sum of all ranks'.
    """

    alike: frozenset[str]
    partial: frozenset[str]


def spread(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> Spread:
    """Divides the model in place, before it is sharded; its parameters may be without values.

    Args:
        plan: styles by the names of modules; those that have no weights on this rank are passed over.
        mesh: of the tensor axis alone.
    """
    _leave_out_a_warning()
    ties = _ties(model)
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    partial: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in plan.items():
        module = modules.get(name)
        if module is None or not any(True for _ in module.parameters()):
            continue
        if style == "experts":
            divide_experts(module, mesh)
            continue
        if style == "sum_gradient":
            partial |= {f"{name}.{own}" for own, _ in module.named_parameters()}
            continue
        buffers = dict(module._buffers)
        parallelize_module(module, mesh, _style(style, module), src_data_rank=None)  # all ranks have the same values
        if style.startswith(("colwise", "rowwise")):
            _keep_plain(module, buffers, mesh)
    for first, others in ties.items():
        for other in others:
            _set(model, other, model.get_parameter(first))
    for name, one in model.named_parameters():
        one.requires_grad_(name not in frozen)
    alike = frozenset(name for name, one in model.named_parameters() if not _is_divided(one))
    return Spread(alike, frozenset(partial) & alike)


def _keep_plain(module: nn.Module, buffers: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Puts the buffers of a divided module back, of which torch has made DTensors: they are DTensors in its forward
    alone, and there only as long as its weights are. (Gemma's embedding multiplies by one.)"""
    module._buffers.update(buffers)
    if any(one is not None for one in buffers.values()):
        cast("Any", module).forward = partial(_with_replicated_buffers, module, mesh, module.forward)


def _with_replicated_buffers(
    module: nn.Module, mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if _steps_aside(module):
        return forward(*args, **kwargs)
    plain: dict[str, Any] = dict(module._buffers)
    slots: dict[str, Any] = module._buffers
    try:
        for name, one in plain.items():
            slots[name] = None if one is None else DTensor.from_local(one, mesh, [Replicate()], run_check=False)
        return forward(*args, **kwargs)
    finally:
        slots |= plain


def _leave_out_a_warning() -> None:
    """FSDP2 warns of whatever ends in `DTensor.to_local()`, a view: to change it in place would lose a hook. A gathered
    head's logits end so, and an objective that changed them in place would change what others see, too."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def _style(word: str, module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):  # takes tokens, which are whole
        by_sequence = word == "rowwise_sequence"
        layout = _SEQUENCE if by_sequence else Replicate()
        return _Rowwise(input_layouts=Replicate(), output_layouts=layout, use_local_output=not by_sequence)
    return _STYLES[word]()


def _steps_aside(module: Any) -> bool:
    """Also while something takes the place of the weight: a pipeline's stages do so to see shapes alone."""
    return Undivided.now or not isinstance(module.weight, DTensor)


def _refuse_keywords(inputs: tuple[object, ...]) -> None:
    """torch's styles look at inputs that come by position alone."""
    if not inputs:
        raise TypeError("it is called with its input by keyword; hand it over by position")


class _Colwise(ColwiseParallel):
    """torch's, which steps aside."""

    @staticmethod
    def _prepare_input_fn(given: Any, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        if not _steps_aside(module):
            _refuse_keywords(inputs)
            return ColwiseParallel._prepare_input_fn(given, wanted, module, inputs, mesh)  # type: ignore[no-untyped-call]
        return None

    @staticmethod
    def _prepare_output_fn(wanted: Any, as_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        if not _steps_aside(module):
            return ColwiseParallel._prepare_output_fn(wanted, as_local, module, outputs, mesh)  # type: ignore[no-untyped-call]
        return None


class _Rowwise(RowwiseParallel):
    """As `_Colwise`."""

    @staticmethod
    def _prepare_input_fn(given: Any, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        if not _steps_aside(module):
            _refuse_keywords(inputs)
            return RowwiseParallel._prepare_input_fn(given, wanted, module, inputs, mesh)  # type: ignore[no-untyped-call]
        return None

    @staticmethod
    def _prepare_output_fn(wanted: Any, as_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        if not _steps_aside(module):
            return RowwiseParallel._prepare_output_fn(wanted, as_local, module, outputs, mesh)  # type: ignore[no-untyped-call]
        return None


class _Sequence(SequenceParallel):
    """As `_Colwise`."""

    @staticmethod
    def _prepare_input_fn(wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        if Undivided.now:
            return inputs
        _refuse_keywords(inputs)
        return SequenceParallel._prepare_input_fn(wanted, module, inputs, mesh)  # type: ignore[no-untyped-call]

    @staticmethod
    def _prepare_output_fn(as_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        if Undivided.now:
            return outputs
        return SequenceParallel._prepare_output_fn(as_local, module, outputs, mesh)  # type: ignore[no-untyped-call]


class _FirstInput(PrepareModuleInput):
    """Of whatever else the module takes nothing is touched.

    Args:
        comes: how the input lies on the ranks, if it doesn't say so itself.
        wanted: how it is to lie.
    """

    def __init__(self, comes: Any, wanted: Any) -> None:
        super().__init__(input_layouts=comes, desired_input_layouts=wanted)

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        if Undivided.now:
            return inputs
        _refuse_keywords(inputs)
        first, *others = inputs
        (prepared,) = super()._prepare_input_fn((first,), device_mesh)  # type: ignore[no-untyped-call]
        return prepared, *others


_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": _Colwise,
    "colwise_gather_output": lambda: _Colwise(output_layouts=Replicate()),
    "colwise_logits": lambda: _Colwise(output_layouts=Shard(-1), use_local_output=False),
    "rowwise": _Rowwise,
    "rowwise_split_input": lambda: _Rowwise(input_layouts=Replicate()),
    "rowwise_sequence": lambda: _Rowwise(output_layouts=_SEQUENCE, use_local_output=False),
    "shared_input": lambda: _FirstInput(Replicate(), Replicate()),
    "sequence": _Sequence,
    "gather_sequence": lambda: _FirstInput(_SEQUENCE, Replicate()),
}


def _ties(model: nn.Module) -> dict[str, list[str]]:
    """Further names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(one), []).append(name)
    return {first: others for first, *others in found.values() if others}


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner).register_parameter(own, parameter)


def _is_divided(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(one.is_shard() for one in tensor.placements)
