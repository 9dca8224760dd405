"""Fully sharded data parallelism (FSDP2): each rank holds a part of every parameter, its gradient and its moments.

              at rest      forward, backward of a block             update
    rank 0    rows 0-3     rows 0-7 -> gradient of rows 0-7 --.     rows 0-3
    rank 1    rows 4-7     rows 0-7 -> gradient of rows 0-7 --+-->  rows 4-7

The optimizer works on this rank's parts as plain tensors, with the kernels of the single process. Elsewhere parameters
and moments are DTensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import NO_CONTEXT, GradientStep
from lockstep.distributed.collectives import LocalGroup, RankGroup
from lockstep.distributed.shard_boxes import RowShards, local_tensor
from lockstep.plan.optimizers import OPTIMIZERS
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.context import Builder, Sharding, ShardingContext
from lockstep.sharding.fsdp_order import NegotiatedOrder, fixed_order
from lockstep.sharding.fsdp_units import AutocastGather, initialize, reshard_all, return_no_views
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.parameter_shards import LocalGradients, ParameterShard, parameter_shards
from lockstep.sharding.single import named_gradients, refuse_other_than_fp32, run_backward

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lockstep.config.schema import FSDP, Config
    from lockstep.core.protocols import Optimizer
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.plan.mesh import Mesh
    from lockstep.sharding.collective_order import CollectiveOrder

_PADDED = 1 << 16  # elements of padding; with as many or more a parameter is sharded along another dim
_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(context: ShardingContext) -> None:
    """Shard the model in place; its parameters are on the CPU, on the device, or without values on the meta device."""
    model, options = context.model, context.config.parallel.fsdp
    precision = options.mixed_precision
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            why = f"fsdp can't divide {name}, a single number; make its shape [1]"
            raise ConfigError(Problem("", "parallel.strategy", why))
    narrow = context.config.precision.parameters == "bf16"
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad and not narrow]
    refuse_other_than_fp32(trained, "parallel.strategy", "fsdp keeps what it trains")
    names = units(model, options, context.blocks)
    _refuse_selective_around(names, context, options)
    mesh = _device_mesh(context.position, options, context.world.device)
    by_rows = OPTIMIZERS[context.config.optim.name].whole_matrices  # it exchanges rows
    dtypes = {name: _DTYPES[getattr(precision, name)] for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    if narrow and dtypes["reduce_dtype"] is None:
        dtypes["reduce_dtype"] = torch.float32  # a sum of bf16 would be rounded by each rank
    trains = any(parameter.requires_grad for parameter in model.parameters())  # else no backward follows
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "shard_placement_fn": None if by_rows else partial(_shard_placement, mesh["shard"].size()),
        "reshard_after_forward": not trains or options.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=precision.cast_forward_inputs),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }
    _cast_buffers(model, _DTYPES[precision.buffer_dtype])
    modules = dict(model.named_modules())
    for name in reversed(names):  # inner units come first
        return_no_views(modules[name])
        fully_shard(modules[name], **arguments)
    return_no_views(model)
    fully_shard(model, **{**arguments, "reshard_after_forward": False})  # the backward needs it at once
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)  # a loss is divided once, by the count of the whole update
        module.set_force_sum_reduction_for_comms(True)
    if options.forward_prefetch:
        wrapped = [cast("FSDPModule", modules[name]) for name in names]
        for unit, following in itertools.pairwise(wrapped):
            unit.set_modules_to_forward_prefetch([following])


def build(context: ShardingContext) -> Sharding:
    """Return FSDP's sharding of a model that `shard` has sharded."""
    model, custom = context.model, context.optimizer.is_custom
    initialize(model)
    factors = OPTIMIZERS[context.config.optim.name].factors
    shards = parameter_shards(model, keeps_dtensors=custom, factors=factors)
    # A user's optimizer may depend on shapes: it gets the DTensors
    named = [(shard.name, shard.whole if custom else shard.local) for shard in shards]
    optimizer = context.optimizer(named, None if custom else _row_shards(shards))
    buffers = SyncedBuffers(model, context.position.data_parallel_group)
    step = FSDPStep(context, shards, optimizer, buffers)
    held, reshard = {shard.name: shard for shard in shards}, partial(reshard_all, model)
    state = ModelState(model, optimizer, buffers=buffers, partition=context.partition, shards=held, before_read=reshard)
    return Sharding(step, state, rounds_to_fp16=context.config.parallel.fsdp.mixed_precision.rounds_to_fp16)


BUILDER = Builder(build, shard)


class FSDPStep(GradientStep):
    """The step of ranks with sharded parameters."""

    def __init__(
        self, context: ShardingContext, shards: Sequence[ParameterShard], optimizer: Optimizer, buffers: SyncedBuffers
    ) -> None:
        model, options = context.model, context.config.parallel.fsdp
        self.module = model
        self._root = cast("FSDPModule", model)
        self._world = context.world.axis
        self._replicas = _mesh(context.position, options).data
        self._partition = context.partition
        self._is_shared = context.partition.sums_gradients
        self._squared_norm = context.squared_norm
        self._each_micro_batch = options.reduce_every == "micro-batch"
        self._offloaded = options.cpu_offload
        self._buffers = buffers
        self._reduces = self._is_last = True
        self._must_reduce_shared = False
        self._shards = shards
        self._gradients = LocalGradients(shards)
        self._custom = context.optimizer.is_custom
        self._optimizer = optimizer
        self._gather = _autocast_gather(context)
        self._order = _collective_order(context)
        eager: Callable[..., Any] = torch.compiler.disable  # traced into a compiled model, messages lose their order
        model.register_forward_pre_hook(eager(self._begin_forward), prepend=True)  # before the gather
        model.register_forward_hook(eager(self._end_forward))

    def begin_update(self, samples: int) -> None:
        if self._gather is not None:  # forwards before an update, such as checks', await no backward
            self._gather.end_backward()

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        reduces = last or self._each_micro_batch
        if reduces != self._reduces:  # the call visits all modules
            self._root.set_requires_gradient_sync(reduces)
            self._reduces = reduces
        self._buffers.before_forward(last)
        self._gradients.clear()
        self._is_last = self._must_reduce_shared = last
        if self._order is not None:
            self._order.begin(last=reduces)
        return NO_CONTEXT

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        run_backward(loss, seed)
        if self._gather is not None:
            self._gather.end_backward()
        if self._order is None:
            return
        self._order.end()
        if self._is_last and isinstance(self._order, NegotiatedOrder):
            self._order.clear_unused(self._shards)

    def squared_norm(self) -> Tensor:
        self._reduce_shared()
        own = self._squared_norm(self._partition.counted(self._gradients.read()))
        return self._world.sum((own / self._replicas).double())  # each of the replicas counts a fraction

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self._reduce_shared()
        return named_gradients(self.module)

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        if self._gather is not None:  # a pipeline's schedule makes its backwards itself
            self._gather.end_backward()
        if self._offloaded:  # the update is made by the host, which must know
            divisor, keep = float(divisor), bool(keep)
        if not self._custom:
            self._gradients.move()
        try:
            self._optimizer.update(rate, divisor, keep)
        except (RuntimeError, NotImplementedError) as error:
            if self._custom and ("Sharding propagation failed" in str(error) or "DTensor" in str(error)):
                why = (
                    "fsdp passes sharded parameters (DTensors) to a custom optimizer, and its step doesn't support "
                    f"them: {str(error).splitlines()[0]} Name an optimizer in optim.name, or set "
                    "parallel.strategy: ddp"
                )
                raise ConfigError(Problem("", "parallel.strategy", why)) from error
            raise

    def _begin_forward(self, module: nn.Module, inputs: object) -> None:
        if self._gather is not None:
            self._gather.begin_forward()
        if self._order is not None:
            self._order.begin_forward()

    def _end_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Free parameters that are still gathered, as the backward would."""
        if self._order is not None:
            self._order.end_forward()
        if not torch.is_grad_enabled():
            for unit in _sharded(module):
                unit.reshard()

    def _reduce_shared(self) -> None:
        """Sum the gradients of parameters that stages share, once an update; at the same point on every rank."""
        if not self._must_reduce_shared:
            return
        self._must_reduce_shared = False
        if self._is_shared:
            self._partition.reduce_shared(self._gradients.read())


def _autocast_gather(context: ShardingContext) -> AutocastGather | None:
    configured = context.config.parallel.fsdp.mixed_precision.param_dtype
    if configured is not None or context.compute is None or not context.cast_weights:
        return None
    return AutocastGather(context.model, context.cast_weights, context.compute, context.world.device)


def _collective_order(context: ShardingContext) -> CollectiveOrder | NegotiatedOrder | None:
    if context.plan.mesh.pipeline > 1:
        return None
    if context.config.parallel.ddp.find_unused_parameters:
        return NegotiatedOrder(context.model, context.position.data_parallel_group)
    return fixed_order(context)


# --- sharding -----------------------------------------------------------------------------------------------------


def _refuse_selective_around(names: Sequence[str], context: ShardingContext, options: FSDP) -> None:
    """Raise ConfigError: torch's selective checkpointing (2.13) fails where a gather is repeated inside a block."""
    recomputed = context.config.memory.activation_checkpointing
    inner = next((name for name in names for block in context.blocks if name.startswith(f"{block}.")), None)
    gathers_again = options.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
    if inner is not None and gathers_again and (recomputed.mode, recomputed.modules) == ("selective", "blocks"):
        why = f"selective fails where {inner} is gathered apart from its block; set full, or parallel.fsdp.wrap: blocks"
        raise ConfigError(Problem("", "memory.activation_checkpointing.mode", why))


def _mesh(position: MeshPosition, options: FSDP) -> Mesh:
    return position.mesh.with_context(divided=options.sharding_strategy != "NO_SHARD")


def _device_mesh(position: MeshPosition, options: FSDP, device: torch.device) -> DeviceMesh:
    mesh = _mesh(position, options)
    axes = ("shard",) if mesh.data == 1 else ("data", "shard")
    if position.device_mesh is not None:
        return position.device_mesh[axes]
    return init_device_mesh(device.type, tuple(getattr(mesh, axis) for axis in axes), mesh_dim_names=axes)


def _row_shards(shards: Sequence[ParameterShard]) -> RowShards | None:
    if not shards:
        return None
    mesh = cast("DTensor", shards[0].whole).device_mesh  # every unit has the same
    group = mesh.get_group("shard")
    axis = RankGroup(group) if group.size() > 1 else LocalGroup()
    return RowShards(axis, {shard.name: tuple(shard.whole.shape) for shard in shards})


def _shard_placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dim along which a parameter is sharded; None: the first.

    FSDP2 pads the first dim to a multiple of the ranks: of 8 experts in one tensor, 64 ranks would gather 64.
    """
    shape = local_tensor(parameter).shape
    padding = -shape[0] % ranks * math.prod(shape[1:])
    if padding < _PADDED:
        return None
    fitting = [dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0]
    return Shard(max(fitting, key=lambda dim: shape[dim])) if fitting else None


def _cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


_NEVER = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward, so nothing would gather them."""


def units(model: nn.Module, options: FSDP, blocks: Sequence[str]) -> list[str]:
    """Return the names of the units' modules in the order of the model: outer ones come before inner ones."""
    if options.wrap == "root":
        return []
    if options.wrap == "blocks":
        wanted = set(blocks)
    elif options.wrap == "size":
        wanted = set(_large(model, options.min_num_params))
    else:
        wanted = set(_of_classes(model, options.wrap))
    return [name for name, module in model.named_modules() if name in wanted and not _shares(model, module)]


def check(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if the model has no module of a class that `wrap` names."""
    units(model, config.parallel.fsdp, ())


def _of_classes(model: nn.Module, classes: Sequence[str]) -> list[str]:
    kinds = [(name, type(module).__name__) for name, module in model.named_modules() if name]
    known = sorted({kind for _, kind in kinds})
    missing = [kind for kind in classes if kind not in known]
    if missing:
        near = [match for match in (closest_match(kind, known) for kind in missing) if match]
        have = f"did you mean {' and '.join(near)}?" if near else f"it has {', '.join(known[:12])}"
        why = f"the model has no module of class {', '.join(missing)}; {have}"
        raise ConfigError(Problem("", "parallel.fsdp.wrap", why))
    return [name for name, kind in kinds if kind in classes]


def _large(model: nn.Module, least: int) -> Iterator[str]:
    """Yield modules of at least `least` parameters, not counting modules that were yielded before."""
    taken: set[int] = set()
    for name, module in reversed(list(model.named_modules())):
        if not name or isinstance(module, _NEVER):
            continue
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if sum(own.values()) >= least:
            taken.update(own)
            yield name


def _shares(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a module outside of `module` has one of its parameters, perhaps by a module that both have."""
    own = set(module.parameters())
    places = tuple(f"{name}." for name, each in model.named_modules(remove_duplicate=False) if each is module)
    named = model.named_parameters(remove_duplicate=False)
    return any(parameter in own and not name.startswith(places) for name, parameter in named)
