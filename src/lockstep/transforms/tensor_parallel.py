"""Tensor parallelism: each matrix is sharded over the ranks of a group, which have the same samples.

              x (on both)       colwise            rowwise
    rank 0    x  ---------->   x W1[:half]'  -->   h0 W2[:, :half]'  --.
    rank 1    x  ---------->   x W1[half:]'  -->   h1 W2[:, half:]'  --+--> sum: the same on both again

(Shoeybi et al. 2019, arXiv:1909.08053.) With sequence parallelism, the sum leaves each rank with its own positions, and
the input of the next colwise matrix is gathered (Korthikanti et al. 2022, arXiv:2205.05198).

To compare with whole weights, each module gathers its own for its call, and again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from torch.utils.checkpoint import checkpoint

from lockstep.core.protocols import Transform
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.distributed.mesh_position import MeshPosition, TensorParallelGroup
from lockstep.transforms.tensor_experts import divide_experts, replaced_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE = Shard(1)  # [samples, positions, ...]


class TensorParallel(Transform):
    """Shards the matrices of a model in place; its parameters may be without values.

    Args:
        plan: Styles by the names of modules; those that have no weights on this rank are skipped.

    Attributes:
        group: The ranks that hold shards of the matrices; None until the transform is applied.
    """

    name = "parallel.tensor"
    after = ("parallel.pipeline",)

    def __init__(self, plan: Mapping[str, str], position: Callable[[], MeshPosition], mode: ForwardMode) -> None:
        self.plan = plan
        self.group: TensorParallelGroup | None = None
        self._position = position
        self._mode = mode

    def apply(self, model: nn.Module) -> nn.Module:
        position = self._position()
        assert position.device_mesh is not None, "a tensor-parallel model has a mesh"
        mesh = position.device_mesh["tensor"]
        names: dict[int, list[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
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
        for first, *tied in names.values():
            for name in tied:
                owner, _, own = name.rpartition(".")
                model.get_submodule(owner).register_parameter(own, model.get_parameter(first))
        for name, tensor in model.named_parameters():
            tensor.requires_grad_(name not in frozen)
        replicated = frozenset(name for name, tensor in model.named_parameters() if not _is_sharded(tensor))
        self.group = TensorParallelGroup(position.tensor, replicated, frozenset(partial_gradients) & replicated)
        return model

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        """Compute with whole weights while the block runs; gradients are sharded. All ranks together."""
        modules: list[Any] = [
            module for module in model.modules() if any(True for _ in module.parameters(recurse=False))
        ]
        overridden = {module: module.__dict__["forward"] for module in modules if "forward" in module.__dict__}
        for module in modules:
            module.forward = partial(_with_whole_weights, module, module.forward)
        self._mode.whole_weights = True
        try:
            yield
        finally:
            self._mode.whole_weights = False
            for module in modules:
                del module.forward
            for module, forward in overridden.items():
                module.forward = forward

    def _divide(self, module: nn.Module, style: str, mesh: DeviceMesh) -> None:
        buffers = dict(module._buffers)
        parallelize_module(module, mesh, _style(style, module, self._mode), src_data_rank=None)  # all have the values
        if style.startswith(("colwise", "rowwise")):
            # torch has made DTensors of the buffers, which must be DTensors only in the module's forward, and only
            # while its weights are. (Gemma's embedding multiplies by a buffer.)
            module._buffers.update(buffers)
            if any(tensor is not None for tensor in buffers.values()):
                forward = partial(_with_replicated_buffers, module, mesh, self._mode, module.forward)
                cast("Any", module).forward = forward


def _with_replicated_buffers(
    module: nn.Module, mesh: DeviceMesh, mode: ForwardMode, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if _is_bypassed(mode, module):
        return forward(*args, **kwargs)
    slots: dict[str, Any] = module._buffers
    plain = dict(slots)
    replicated = {
        name: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        for name, tensor in plain.items()
        if tensor is not None
    }
    slots.update(replicated)
    replaced: dict[str, Any] = {}
    try:
        outputs = forward(*args, **kwargs)
        replaced = {name: tensor for name, tensor in slots.items() if tensor is not replicated.get(name)}
        return outputs
    finally:
        slots.update(plain)
        for name, tensor in replaced.items():
            slots[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _with_whole_weights(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
        return forward(*args, **kwargs)

    def gathered(*args: Any, **kwargs: Any) -> Any:
        with replaced_parameters(module, lambda parameter: parameter.full_tensor()):
            return forward(*args, **kwargs)

    return checkpoint(gathered, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _is_bypassed(mode: ForwardMode, module: Any) -> bool:
    """Return whether a style has no effect now; a placeholder replaces the weight in dry runs of pipeline stages."""
    return mode.whole_weights or not isinstance(module.weight, DTensor)


def _refuse_keywords(inputs: tuple[object, ...]) -> None:
    """Raise TypeError if there are none: torch's styles prepare only positional inputs."""
    if not inputs:
        raise TypeError("it is called with its input by keyword; pass it by position")


def _style(word: str, module: nn.Module, mode: ForwardMode) -> ParallelStyle:
    if isinstance(module, nn.Embedding):  # its input, tokens, is whole
        by_sequence = word == "rowwise_sequence"
        layout = _SEQUENCE if by_sequence else Replicate()
        return _Rowwise(mode, input_layouts=Replicate(), output_layouts=layout, use_local_output=not by_sequence)
    return _STYLES[word](mode)


class _Bypassable:
    """Disables one of torch's styles while the forward mode bypasses it."""

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
    """torch's colwise style, which the mode can bypass."""


class _Rowwise(_Bypassable, RowwiseParallel):
    """torch's rowwise style, which the mode can bypass."""


class _Sequence(SequenceParallel):
    """torch's sequence style, which the mode can bypass."""

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
    """Replicates the first input, which has this layout if it isn't a DTensor; passes on the others unchanged."""

    def __init__(self, mode: ForwardMode, layout: Any) -> None:
        super().__init__(input_layouts=layout, desired_input_layouts=Replicate())
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
    "shared_input": lambda mode: _FirstInput(mode, Replicate()),
    "sequence": _Sequence,
    "gather_sequence": lambda mode: _FirstInput(mode, _SEQUENCE),
}


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
