"""FSDP2's units: the modules that are gathered and reduced one at a time, and the collectives that each issues.

    at rest   gathered under autocast     gradient    reduced
    fp32      bf16: weights of products   bf16        fp32, in one collective for each unit
    fp32      fp32: norms, embeddings     fp32

Names that are private to torch's implementation are used only here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.core.errors import ConfigError, Problem, RunFailed

if TYPE_CHECKING:
    import torch.distributed as dist


class FSDPUnit:
    """A group of parameters that FSDP2 gathers and reduces together; the root's own has no name."""

    def __init__(self, name: str, number: int, group: Any) -> None:
        self.number = number
        self._name = name
        self.group = group
        self._gather = group._all_gather_comm

    @property
    def trained(self) -> list[Tensor]:
        """The trained parameters, as this rank holds them."""
        return [param.sharded_param for param in self._trained]

    def __str__(self) -> str:
        return self._name or "the modules outside of all units"

    def watch(
        self,
        module: FSDPModule,
        on_gather: Callable[[FSDPUnit], None],
        on_reduce: Callable[[FSDPUnit, list[Tensor]], None],
    ) -> None:
        """Call back before each collective; `on_reduce` gets the trained parameters with a gradient, if any is sent."""
        module.set_custom_all_gather(cast("Any", _AnnouncedGather(self._gather, lambda: on_gather(self))))
        original = self.group.post_backward

        def post_backward(*unused: Any) -> None:
            if self.group.reduce_grads:
                on_reduce(self, [param.sharded_param for param in self._trained if _has_gradient(param)])
            if all(map(_was_gathered, self.group.fsdp_params)):
                original(*unused)  # torch 2.13 would read gradients of parameters that were never gathered

        self.group.post_backward = post_backward

    def send_zeros(self, wanted: bool) -> None:
        """Set whether a reduction sends zeros for parameters without a gradient, or leaves them out."""
        self.group.reduce_scatter_unused_params = wanted

    @torch.no_grad()
    def gather_for_others(self) -> None:
        """Take part in a gather that this rank doesn't need."""
        group = self.group
        flat = [param._sharded_param_data.view(-1) for param in group.fsdp_params]
        dtypes = [param.param_dtype or param.orig_dtype for param in group.fsdp_params]
        parts = [param.to(group.device, dtype) for param, dtype in zip(flat, dtypes, strict=True)]
        part = torch.cat([part.view(torch.uint8) for part in parts] if len(set(dtypes)) > 1 else parts)
        among: dist.ProcessGroup = group._all_gather_process_group
        whole = part.new_empty(part.numel() * among.size())
        self._gather(output_tensor=whole, input_tensor=part, group=among)

    @torch.no_grad()
    def reduce_for_others(self) -> None:
        """Take part in a reduction with zeros; keep this rank's share of the sum."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

        group: Any = self.group
        zeros = [
            torch.zeros(param._orig_size, dtype=_sent_dtype(param), device=group.device) for param in self._trained
        ]
        shards: Any = group._reduce_scatter_process_group if isinstance(group.mesh_info, FSDPMeshInfo) else None
        replicas = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
        reduced: Any = foreach_reduce(
            self._trained,
            zeros,
            shards,
            group.comm_ctx.reduce_scatter_stream,
            group._reduce_scatter_comm,
            group._orig_dtype,
            group._reduce_dtype,
            group.device,
            group.gradient_divide_factor,
            replicas,
            group.comm_ctx.all_reduce_stream,
            group.all_reduce_grads,
            None,
            None,
            group.force_sum_reduction_for_comms,
        )
        group.device_handle.current_stream().wait_event(reduced[3])  # after it the zeros may be freed
        for param in self._trained:
            if param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()
                param.grad_offload_event = None

    @property
    def _trained(self) -> list[Any]:
        return [param for param in self.group.fsdp_params if _is_trained(param)]


class _NoView(torch.autograd.Function):
    """Returns its input as a tensor with the same memory and version that isn't a view of another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def return_no_views(module: nn.Module) -> None:
    """Keep a unit from returning views, as a Linear with a bias does; called before it is sharded.

    A change in place, as by ReLU(inplace=True), takes FSDP2's hook from a view: no gather, or no gradient at all.
    """

    def without_views(module: nn.Module, inputs: object, outputs: object) -> object:
        if not torch.is_grad_enabled():
            return None
        if not any(map(_is_view, tree_leaves(outputs))):
            handle.remove()
        return tree_map_only(_is_view, _NoView.apply, outputs)

    eager: Callable[..., Any] = torch.compiler.disable
    handle = module.register_forward_hook(eager(without_views))


def _is_view(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value._base is not None


class AutocastGather:
    """Gathers parameters in autocast's precision where autocast would cast them: the same values in half the bytes.

    Autocast over fp32 parameters keeps a copy of each until its backward: 2 bytes a parameter of the whole model on
    every rank. What is gathered in that precision is freed with its unit.
    """

    def __init__(self, model: nn.Module, names: frozenset[str], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._kind = device.type
        self._on = False
        self._awaited = False
        held = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        self._groups = [unit.group for unit in units_of(model)]
        params = [param for group in self._groups for param in group.fsdp_params]
        self._lowered = [param for param in params if id(param.sharded_param) in held]
        lowered = set(map(id, self._lowered))
        for group in self._groups:
            kinds = {id(param) in lowered for param in group.fsdp_params if _is_trained(param)}
            if len(kinds) > 1:  # a reduction takes gradients of one dtype
                group.post_backward = partial(_reduce_in_one_dtype, group, group.post_backward)

    def begin_forward(self) -> None:
        """Set the precision for a forward of the whole model."""
        on = torch.is_autocast_enabled(self._kind) and torch.get_autocast_dtype(self._kind) is self._dtype
        if on is not self._on:
            if self._awaited:
                raise RunFailed(
                    "the model was called under autocast and outside of it before one backward, and fsdp gathers "
                    "parameters in one precision at a time; call it under autocast, or set "
                    "parallel.fsdp.mixed_precision.param_dtype: fp32"
                )
            self._switch(on)
        self._awaited = torch.is_grad_enabled()

    def end_backward(self) -> None:
        """Note that no backward is awaited."""
        self._awaited = False

    def _switch(self, on: bool) -> None:
        self._on = on
        for group in self._groups:
            group._to_sharded()
        for param in self._lowered:
            param.all_gather_outputs = []
            vars(param).pop("_unsharded_param", None)
            param.param_dtype = self._dtype if on else None


def _reduce_in_one_dtype(group: Any, original: Callable[..., None], *unused: Any) -> None:
    """Convert a unit's gradients to the reduction's precision, after its parameters are freed."""
    if group.reduce_grads:
        params = [param for param in group.fsdp_params if _is_trained(param) and _was_gathered(param)]
        for param in params:
            param.accumulate_unsharded_grad_if_needed()
        if group.reshard_after_backward:
            group._to_sharded()
        for param in params:
            param.to_accumulated_grad_if_needed()
            # torch 2.13 has it, 2.11 doesn't
            if getattr(group, "reduce_scatter_unused_params", False) and not _has_gradient(param):
                param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=_sent_dtype(param))
    original(*unused)


def _sent_dtype(param: Any) -> torch.dtype:
    return cast("torch.dtype", param.reduce_dtype or param.param_dtype or param.orig_dtype)


def units_of(model: nn.Module) -> dict[FSDPUnit, FSDPModule]:
    """Return the units in the order of the model; the root's comes first."""
    units: dict[FSDPUnit, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                units[FSDPUnit(name, len(units), group)] = module
    return units


def initialize(model: nn.Module) -> None:
    """Make FSDP2's own state, as its first forward would: it may replace the memory of parameters (pinned, padded)."""
    cast("Any", model)._get_fsdp_state()._lazy_init()


def reshard_all(model: nn.Module) -> None:
    """Free the whole parameters that a failed forward or backward has gathered and not freed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                group._to_sharded()


def refuse_without_zeros() -> None:
    """Raise ConfigError if this torch can't send zeros for a parameter without a gradient."""
    if getattr(FSDPModule, "set_reduce_scatter_unused_params", None) is None:
        message = f"true needs torch 2.13 under fsdp, and this is {torch.__version__}"
        raise ConfigError(Problem("", "parallel.ddp.find_unused_parameters", message))


def _groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _is_trained(param: Any) -> bool:
    return bool(param.sharded_param.requires_grad)


def _was_gathered(param: Any) -> bool:
    return "_unsharded_param" in vars(param)


def _has_gradient(param: Any) -> bool:
    if not _was_gathered(param):
        return False
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


class _AnnouncedGather:
    def __init__(self, plain: Any, announce: Callable[[], None]) -> None:
        self._plain = plain
        self._announce = announce

    def allocate(self, *size: Any, **kind: Any) -> Tensor:
        return cast("Tensor", self._plain.allocate(*size, **kind))

    def __call__(self, *tensors: Any, **how: Any) -> Any:
        self._announce()
        return self._plain(*tensors, **how)
