"""Tensor parallelism: each matrix is divided over the ranks of a group, which have the same samples.

              x (on both)       colwise            rowwise
    rank 0    x  ---------->   x W1[:half]'  -->   h0 W2[:, :half]'  --.
    rank 1    x  ---------->   x W1[half:]'  -->   h1 W2[:, half:]'  --+--> sum: the same on both again

(Shoeybi et al. 2019, arXiv:1909.08053.) With sequence parallelism, the sum leaves each rank with its own positions, on
which norms and dropout work, and the input of the next colwise matrix is gathered (Korthikanti et al. 2022,
arXiv:2205.05198).

Divided parameters are DTensors on the tensor axis, under their own names; all others stay whole on each rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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

from lockstep.core.protocols import Transform
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.distributed.mesh_position import MeshPosition, TensorParallelGroup
from lockstep.transforms.tensor_experts import divide_experts
from lockstep.transforms.whole_weights import whole_weights

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE = Shard(1)  # [samples, positions, ...]


class TensorParallel(Transform):
    """Divides the matrices of a model in place; its parameters may be without values.

    Args:
        plan: Styles by the names of modules; those that have no weights on this rank are skipped.
        position: Returns this rank's position in the mesh.
        mode: The model's forward mode.

    Attributes:
        group: The ranks over which matrices are divided; known once it is applied.
    """

    name = "parallel.tensor"
    after = ("parallel.pipeline",)

    def __init__(self, plan: Mapping[str, str], position: Callable[[], MeshPosition], mode: ForwardMode) -> None:
        self.plan = plan
        self.group: TensorParallelGroup | None = None
        self._position = position
        self._mode = mode

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return None  # the plan was checked when it was made

    def apply(self, model: nn.Module) -> nn.Module:
        position = self._position()
        assert position.device_mesh is not None, "a model whose matrices are divided has a mesh"
        mesh = position.device_mesh["tensor"]
        _ignore_view_warning()
        ties = _ties(model)
        frozen = {name for name, tensor in model.named_parameters() if not tensor.requires_grad}
        partial_gradients: set[str] = set()
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, style in self.plan.items():
            module = modules.get(name)
            if module is None or not any(True for _ in module.parameters()):
                continue
            if style == "experts":
                divide_experts(module, mesh, self._mode)
            elif style == "sum_gradient":
                partial_gradients |= {f"{name}.{own}" for own, _ in module.named_parameters()}
            else:
                self._divide(module, style, mesh)
        for first, others in ties.items():
            for other in others:
                owner, _, own = other.rpartition(".")
                model.get_submodule(owner).register_parameter(own, model.get_parameter(first))
        for name, tensor in model.named_parameters():
            tensor.requires_grad_(name not in frozen)
        replicated = frozenset(name for name, tensor in model.named_parameters() if not _is_divided(tensor))
        self.group = TensorParallelGroup(position.tensor, replicated, frozenset(partial_gradients) & replicated)
        return model

    def whole_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model computes with whole weights. All ranks together."""
        return whole_weights(self._mode, model)

    def _divide(self, module: nn.Module, style: str, mesh: DeviceMesh) -> None:
        buffers = dict(module._buffers)
        parallelize_module(module, mesh, _style(style, module, self._mode), src_data_rank=None)  # all have the values
        if style.startswith(("colwise", "rowwise")):
            # torch has made DTensors of the buffers, which they have to be in the module's forward alone, and there
            # only as long as its weights are. (Gemma's embedding multiplies by one.)
            module._buffers.update(buffers)
            if any(tensor is not None for tensor in buffers.values()):
                forward = partial(_with_replicated_buffers, module, mesh, self._mode, module.forward)
                cast("Any", module).forward = forward


def _with_replicated_buffers(
    module: nn.Module, mesh: DeviceMesh, mode: ForwardMode, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if _is_bypassed(mode, module):
        return forward(*args, **kwargs)
    plain: dict[str, Any] = dict(module._buffers)
    slots: dict[str, Any] = module._buffers
    try:
        for name, tensor in plain.items():
            slots[name] = None if tensor is None else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        return forward(*args, **kwargs)
    finally:
        slots |= plain


def _ignore_view_warning() -> None:
    """Silence FSDP2's warning about whatever ends in `DTensor.to_local()`, a view: to change it in place would lose a
    hook. A gathered head's logits end so, and an objective that changed them in place would change what others see."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def _is_bypassed(mode: ForwardMode, module: Any) -> bool:
    """Return whether a style has no effect now; also while a placeholder replaces the weight, as in the dry runs of a
    pipeline's stages."""
    return mode.whole_weights or not isinstance(module.weight, DTensor)


def _refuse_keywords(inputs: tuple[object, ...]) -> None:
    """Raise TypeError: torch's styles look at inputs that come by position alone."""
    if not inputs:
        raise TypeError("it is called with its input by keyword; pass it by position")


def _style(word: str, module: nn.Module, mode: ForwardMode) -> ParallelStyle:
    if isinstance(module, nn.Embedding):  # takes tokens, which are whole
        by_sequence = word == "rowwise_sequence"
        layout = _SEQUENCE if by_sequence else Replicate()
        return _Rowwise(mode, input_layouts=Replicate(), output_layouts=layout, use_local_output=not by_sequence)
    return _STYLES[word](mode)


class _Bypassable:
    """Makes one of torch's styles have no effect while the mode says so."""

    def __init__(self, mode: ForwardMode, **layouts: Any) -> None:
        super().__init__(**layouts)
        self._mode = mode

    def _prepare_input_fn(self, given: Any, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        if _is_bypassed(self._mode, module):
            return None
        _refuse_keywords(inputs)
        return cast("Any", super())._prepare_input_fn(given, wanted, module, inputs, mesh)

    def _prepare_output_fn(self, wanted: Any, as_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        if _is_bypassed(self._mode, module):
            return None
        return cast("Any", super())._prepare_output_fn(wanted, as_local, module, outputs, mesh)


class _Colwise(_Bypassable, ColwiseParallel):
    """torch's style, which the mode can bypass."""


class _Rowwise(_Bypassable, RowwiseParallel):
    """torch's style, which the mode can bypass."""


class _Sequence(SequenceParallel):
    """torch's style, which the mode can bypass."""

    def __init__(self, mode: ForwardMode) -> None:
        super().__init__()
        self._mode = mode

    def _prepare_input_fn(self, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:  # type: ignore[override]
        if self._mode.whole_weights:
            return inputs
        _refuse_keywords(inputs)
        return SequenceParallel._prepare_input_fn(wanted, module, inputs, mesh)  # type: ignore[no-untyped-call]

    def _prepare_output_fn(self, as_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:  # type: ignore[override]
        if self._mode.whole_weights:
            return outputs
        return SequenceParallel._prepare_output_fn(as_local, module, outputs, mesh)  # type: ignore[no-untyped-call]


class _FirstInput(PrepareModuleInput):
    """Prepares the first input; what else the module takes is passed on as it is.

    Args:
        comes: How the input lies on the ranks, if it doesn't state it itself.
        wanted: How it has to lie.
    """

    def __init__(self, mode: ForwardMode, comes: Any, wanted: Any) -> None:
        super().__init__(input_layouts=comes, desired_input_layouts=wanted)
        self._mode = mode

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        if self._mode.whole_weights:
            return inputs
        _refuse_keywords(inputs)
        first, *others = inputs
        (prepared,) = super()._prepare_input_fn((first,), device_mesh)  # type: ignore[no-untyped-call]
        return prepared, *others


_STYLES: Mapping[str, Callable[[ForwardMode], ParallelStyle]] = {
    "colwise": _Colwise,
    "colwise_gather_output": lambda mode: _Colwise(mode, output_layouts=Replicate()),
    "colwise_logits": lambda mode: _Colwise(mode, output_layouts=Shard(-1), use_local_output=False),
    "rowwise": _Rowwise,
    "rowwise_split_input": lambda mode: _Rowwise(mode, input_layouts=Replicate()),
    "rowwise_sequence": lambda mode: _Rowwise(mode, output_layouts=_SEQUENCE, use_local_output=False),
    "shared_input": lambda mode: _FirstInput(mode, Replicate(), Replicate()),
    "sequence": _Sequence,
    "gather_sequence": lambda mode: _FirstInput(mode, _SEQUENCE, Replicate()),
}


def _ties(model: nn.Module) -> dict[str, list[str]]:
    """Return the further names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _is_divided(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
