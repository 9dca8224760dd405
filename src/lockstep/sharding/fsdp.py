"""Fully sharded data parallelism (FSDP2): each rank holds a part of every parameter, its gradient and its moments.

              at rest      forward, backward of a block             update
    rank 0    rows 0-3     rows 0-7 -> gradient of rows 0-7 --.     rows 0-3, by an optimizer that knows these alone
    rank 1    rows 4-7     rows 0-7 -> gradient of rows 0-7 --+-->  rows 4-7
                           gathered    reduced, each its part

The optimizer works on this rank's parts as plain tensors: an elementwise rule doesn't notice, and its kernels are those
of the single process. To the outside, parameters and moments are DTensors, which know where their part lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.core.errors import ConfigError, Problem
from lockstep.sharding.buffers import SharedBuffers
from lockstep.sharding.fsdp_order import Joined, OneOrder, SameOrder
from lockstep.sharding.fsdp_units import divide_again
from lockstep.sharding.local_parts import trained_parts
from lockstep.sharding.single import NO_WINDOW, SquaredNorm
from lockstep.sharding.state import live_state, restore_state, whole_gradients, whole_weights, without_gradient
from lockstep.sharding.wrapping import units

if TYPE_CHECKING:
    from lockstep.config.schema import FSDP, FSDPPrecision
    from lockstep.core.protocols import Optimizer
    from lockstep.core.records import TrainingState
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.plan.mesh import Mesh
    from lockstep.sharding.pieces import Pieces

OptimizerOf = Callable[[Iterable[tuple[str, nn.Parameter]]], "Optimizer"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, options: FSDP, place: MeshPosition, device: torch.device, blocks: Sequence[str]) -> None:
    """Divides the model in place, its parameters on the CPU, on `device`, or without values on the meta device.

    Args:
        blocks: names of the repeated layers.

    Raises:
        ConfigError: FSDP2 can't divide this model.
    """
    _refuse(model)
    names = units(model, options, blocks)
    arguments: dict[str, Any] = {
        "mesh": _device_mesh(place, options, device),
        "reshard_after_forward": options.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        "mp_policy": _precision(options.mixed_precision),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }
    _cast_buffers(model, options.mixed_precision)
    modules = dict(model.named_modules())
    for name in reversed(names):  # what is inside of another unit comes first
        fully_shard(modules[name], **arguments)
    fully_shard(model, **{**arguments, "reshard_after_forward": False})  # the backward begins with what it holds
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)  # a loss is divided once, by the count of the whole update
        module.set_force_sum_reduction_for_comms(True)
    if options.forward_prefetch:
        wrapped = [cast("FSDPModule", modules[name]) for name in names]
        for one, after in itertools.pairwise(wrapped):
            one.set_modules_to_forward_prefetch([after])


class ShardedByFSDP:
    """Args:
    model: divided by `shard`, and with its values.
    optimizer_of: makes the optimizer of named parameters: plain ones, this rank's parts.
    pieces: who holds what of a model that is cut.
    whole: give it the DTensors in their place: it is a user's, and may look at shapes.
    order: keeps the ranks' collectives in one order; None: a pipeline's schedule does.
    """

    averages_over = 1
    norm_is_whole = False

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: OptimizerOf,
        squared_norm: SquaredNorm,
        options: FSDP,
        place: MeshPosition,
        pieces: Pieces,
        *,
        whole: bool,
        order: SameOrder | None,
    ) -> None:
        self.bare = self.module = model
        self._root = cast("FSDPModule", model)
        self._replicas = _mesh(place, options).data
        self._pieces = pieces
        self._squared_norm = squared_norm
        self._each_micro_batch = options.reduce_every == "micro-batch"
        self._offloaded = options.cpu_offload
        self._buffers = SharedBuffers(model, place.data_parallel_group)
        self._reduces = self._is_last = True
        self._shares_ends = False
        self._parts = trained_parts(model)
        self._by_name = {part.name: part for part in self._parts}
        self._whole = whole
        self._optimizer = optimizer_of((part.name, part.whole if whole else part.local) for part in self._parts)
        self._order = order
        eager: Callable[..., Any] = torch.compiler.disable  # traced into a compiled model, messages lose their order
        model.register_forward_pre_hook(eager(self._begin_forward), prepend=True)  # before the gather
        model.register_forward_hook(eager(self._end_forward))

    def window(self, last: bool) -> AbstractContextManager[object]:
        reduces = last or self._each_micro_batch
        if reduces != self._reduces:  # it walks through all modules
            self._root.set_requires_gradient_sync(reduces)
            self._reduces = reduces
        self._buffers.before_forward(last)
        self._is_last = self._shares_ends = last
        if self._order is not None:
            self._order.begin(reduces=reduces)
        return NO_WINDOW

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]
        if self._order is None:
            return
        self._order.end_backward()
        if self._is_last:
            self._order.end_update(self._parts)

    def unreached(self) -> list[str]:
        return without_gradient(self.bare)

    def squared_norm(self) -> Tensor:
        """This rank's share: each of the replicas that hold the same part counts a fraction of it."""
        self._add_shared()
        counted = [part for part in self._parts if self._pieces.counts(part.name)]
        norm = self._squared_norm([part.gradient for part in counted if part.whole.grad is not None])
        return norm / self._replicas

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        if self._offloaded:  # the update is made by the host, which must know
            divisor, keep = float(divisor), bool(keep)
        if not self._whole:
            for part in self._parts:
                part.hand_over()
        try:
            self._optimizer.update(rate, divisor, keep)
        except (RuntimeError, NotImplementedError) as error:
            if self._whole and ("Sharding propagation failed" in str(error) or "DTensor" in str(error)):
                raise _not_divisible(error) from error
            raise

    def synchronize(self) -> None:
        self._buffers.synchronize()

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._pieces.whole(whole_weights(self.bare, wanted or self._pieces.several), wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        self._add_shared()
        return self._pieces.whole(whole_gradients(self.bare, wanted or self._pieces.several), wanted)

    def close(self) -> None:
        pass

    def state(self) -> TrainingState:
        divide_again(self.bare)
        return self._pieces.state(live_state(self.bare, self._optimizer, self._shown))

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, self._pieces.own(state), self._fit)

    def _begin_forward(self, module: nn.Module, inputs: object) -> None:
        if self._order is not None:
            self._order.begin_forward()

    def _end_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Without a backward nothing else would give back what is still gathered."""
        if self._order is not None:
            self._order.end_forward()
        if not torch.is_grad_enabled():
            for unit in _sharded(module):
                unit.reshard()

    def _add_shared(self) -> None:
        """Once an update; at the same point on every rank."""
        if not self._shares_ends:
            return
        self._shares_ends = False
        self._pieces.add_shared({part.name: part.gradient for part in self._parts if part.whole.grad is not None})

    def _shown(self, name: str, value: Tensor) -> Tensor:
        return self._by_name[name].shown(value)

    def _fit(self, name: str, value: Tensor) -> Tensor:
        part = self._by_name[name]
        value = part.fit(value)
        return part.as_whole(value.to(part.local.device)) if self._whole and part.is_like(value) else value


def same_order(
    model: nn.Module, place: MeshPosition, device: torch.device, *, find_unused: bool, before_unused: str
) -> SameOrder | None:
    """What keeps the collectives of a divided model's ranks in one order. All ranks together.

    Args:
        find_unused: a rank's samples may leave out what others use.
        before_unused: as `sharding.state.unused_parameters` has it.
    """
    if place.mesh.pipeline > 1:
        return None
    if find_unused:
        return Joined(model, place.data_parallel_group)
    return OneOrder(model, place.data_parallel_group, device, before_unused)


# --- making it ----------------------------------------------------------------------------------------------------


def _refuse(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                Problem("", "parallel.strategy", f"fsdp can't divide {name}, a single number; make its shape [1]")
            )
        if parameter.dtype != torch.float32:
            message = f"fsdp keeps parameters in fp32, and {name} is {str(parameter.dtype).removeprefix('torch.')}"
            raise ConfigError(Problem("", "parallel.strategy", f"{message}; convert the model with .float()"))


def _mesh(place: MeshPosition, options: FSDP) -> Mesh:
    return place.mesh.with_context(divided=options.sharding_strategy != "NO_SHARD")


def _device_mesh(place: MeshPosition, options: FSDP, device: torch.device) -> DeviceMesh:
    mesh, cut = _mesh(place, options), place.device_mesh
    if mesh.data == 1:
        return (
            cut["shard"] if cut is not None else init_device_mesh(device.type, (mesh.shard,), mesh_dim_names=("shard",))
        )
    if cut is not None:
        return cut["data", "shard"]
    return init_device_mesh(device.type, (mesh.data, mesh.shard), mesh_dim_names=("data", "shard"))


def _precision(asked: FSDPPrecision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_dtype(asked.param_dtype),
        reduce_dtype=_dtype(asked.reduce_dtype),
        output_dtype=_dtype(asked.output_dtype),
        cast_forward_inputs=asked.cast_forward_inputs,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]


def _cast_buffers(model: nn.Module, asked: FSDPPrecision) -> None:
    """FSDP2 leaves buffers alone."""
    dtype = _dtype(asked.buffer_dtype)
    if dtype is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _not_divisible(error: Exception) -> ConfigError:
    first = str(error).splitlines()[0]
    message = (
        f"fsdp gives an optimizer that was handed over divided parameters (DTensors), and its step "
        f"can't work on them: {first} Name one in optim.name, or take parallel.strategy: ddp"
    )
    return ConfigError(Problem("", "parallel.strategy", message))
