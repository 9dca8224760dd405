"""DistributedDataParallel: every rank holds everything; gradients are reduced while the backward runs.

rank 0   model, gradient ---.                      .--> optimizer     the same update everywhere
rank 1   model, gradient ---+-- bucket by bucket --+--> optimizer
                                mean over ranks
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.phase_clock import Phase
from lockstep.core.protocols import GradientStep
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.context import Builder, Sharding, ShardingContext, SquaredNorm
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.single import (
    NO_SYNC,
    named_gradients,
    present_gradients,
    trainable_parameters,
    unused_parameters,
    without_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.schema import DDP
    from lockstep.core.protocols import Optimizer
    from lockstep.distributed.process_group import World


T = TypeVar("T")
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""Part of torch's message; indices into the trained parameters in their order."""


class DDPStep(GradientStep):
    """The step of ranks whose gradients DDP averages."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        squared_norm: SquaredNorm,
        options: DDP,
        world: World,
        sync_buffers: bool,
        accumulates: bool = False,
    ) -> None:
        self._model = model
        self._ranks = world.axis.size
        self._clock, self._reduced = world.clock, world.reduced
        self._optimizer = optimizer
        self._parameters = trainable_parameters(model)
        is_seen = options.compression != "none"  # it is by hooks in Python, whose collectives are counted
        self._reduced_bytes = 0 if is_seen else sum(each.numel() * each.element_size() for each in self._parameters)
        self._squared_norm = squared_norm
        self._in_buckets = _InBuckets(self._parameters) if accumulates and options.gradient_as_bucket_view else None
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters
        sync = (
            "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        )  # until torch 2.12
        make = partial(
            DistributedDataParallel,
            model,
            device_ids=None if world.device.type == "cpu" else [world.device.index],
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            bucket_cap_mb=options.bucket_mb,
            **{sync: sync_buffers},  # type: ignore[arg-type]
        )
        self._ddp = make() if self._in_buckets is None else self._in_buckets.renew(make)
        self.module = self._ddp
        self._after_discard = _compress(self._ddp, options, world.backend)
        self._learns_graph = options.static_graph
        self._unused_remedy = "leave parallel.ddp.static_graph out and " if options.static_graph else ""
        self._reduces = True
        self._orders_buckets = options.static_graph or not options.find_unused_parameters

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        self._reduces = last
        # A static graph is learned in the first backward, which must reduce (torch 2.13 asserts it). Gradients that are
        # reduced already are the same on all ranks, so their mean in the last backward changes nothing.
        sync, self._learns_graph = last or self._learns_graph, False
        if sync:
            self._reduced.size += self._reduced_bytes
        if self._in_buckets is not None:
            self._in_buckets.active = not sync
        return NO_SYNC if sync else self._ddp.no_sync()

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        if not self._reduces:
            loss.backward(seed)  # type: ignore[no-untyped-call]
            return
        mark = loss.register_hook(self._mark_reduction)  # type: ignore[no-untyped-call]
        loss.backward(seed)  # type: ignore[no-untyped-call]
        self._clock.enter(Phase.BACKWARD)
        mark.remove()
        self._refuse_unreduced()

    def _mark_reduction(self, gradient: Tensor) -> None:
        """Let the clock count what DDP does at the backward's end, when it waits for its buckets, as communication.

        The engine's callbacks run in the order in which they are queued, and DDP queues its own at the last bucket.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._clock.enter(Phase.COMMUNICATION))

    def parameters_without_gradient(self) -> list[str]:
        return without_gradient(self._model)

    def _refuse_unreduced(self) -> None:
        """Raise ConfigError if this rank's backward left out parameters whose reduction other ranks wait for."""
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch does in the next forward, after the hang
        except RuntimeError as error:
            trained = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
            if indices := _WITHOUT_GRADIENT.search(str(error)):
                names = [trained[int(index)] for index in indices[1].split()]
            else:
                names = self.parameters_without_gradient()
            where = f"in the last micro-batch of an update on rank {dist.get_rank()}, and others may wait for it"
            raise unused_parameters(names or trained, where=where, remedy=self._unused_remedy) from error

    def squared_norm(self) -> Tensor:
        mean = self._squared_norm(present_gradients(self._parameters))
        return mean.double() * self._ranks**2

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return named_gradients(self._model, self._ranks)

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._optimizer.update(rate, divisor / self._ranks, keep)
        if self._in_buckets is not None and self._orders_buckets:
            self._in_buckets.renew(self._ddp.reducer._rebuild_buckets)  # now, or DDP does it in the next forward
            self._orders_buckets = False
        if self._after_discard is not None and not keep:
            self._after_discard()

    def close(self) -> None:
        if self._in_buckets is not None:
            self._in_buckets.close()
        # A DDP module that outlives its group keeps the group: see `RankGroup.close`
        self._ddp = self.module = cast("DistributedDataParallel", None)


class _InBuckets:
    """Accumulates the gradients of micro-batches in DDP's buckets.

        first micro-batch   a parameter's gradient --> its view of a bucket; the original is freed
        others              added there
        last                reduced there

    DDP alone moves gradients there in the last micro-batch, until which two copies of all exist.

    Attributes:
        active: Whether the next backward is of a micro-batch before the last one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.active = False
        self._parameters = parameters
        self._views: dict[Tensor, Tensor] = {}
        tensors: Any = parameters  # torch has no types for their hooks
        self._hooks = [each.register_post_accumulate_grad_hook(self._move) for each in tensors]

    def renew(self, make: Callable[[], T]) -> T:
        """Let DDP make buckets while no gradient exists, and remember the views that it makes of each."""
        self._views = {}  # or the old buckets would exist beside the new ones
        zeros = [each.detach().new_zeros(()).expand_as(each) for each in self._parameters]
        for parameter, zero in zip(self._parameters, zeros, strict=True):
            parameter.grad = zero  # DDP makes views of its buckets of gradients that exist
        made = make()
        for parameter, zero in zip(self._parameters, zeros, strict=True):
            if parameter.grad is not None and parameter.grad is not zero:  # those of sparse gradients have no view
                self._views[parameter] = parameter.grad
            parameter.grad = None
        return made

    def _move(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if self.active and gradient is not None and (view := self._views.get(parameter, gradient)) is not gradient:
            view.copy_(gradient)
            parameter.grad = view

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._views = {}


def build(context: ShardingContext) -> Sharding:
    """Return DDP's sharding; `replicas`' for a partitioned or tensor-parallel model, which DDP doesn't take."""
    if context.plan.mesh.pieces > 1:
        from lockstep.sharding import replicas  # DTensors take 0.5 s to import

        return replicas.build(context)
    model, options = context.model, context.config.parallel.ddp
    optimizer, buffers = context.optimizer(model.named_parameters()), SyncedBuffers(model)
    accumulates = context.plan.batch.accumulation > 1
    step = DDPStep(model, optimizer, context.squared_norm, options, context.world, bool(buffers), accumulates)
    return Sharding(step, ModelState(model, optimizer, buffers=buffers))


BUILDER = Builder(build)


def _compress(module: DistributedDataParallel, options: DDP, backend: str) -> Callable[[], None] | None:
    """Register the requested compression; return a function to call when an update is discarded, if one is needed."""
    if options.compression == "none":
        return None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if options.compression == "bf16" and backend == "gloo":
        message = "gloo has no bf16 all-reduce; fp16 and powersgd run on it, bf16 on nccl"
        raise ConfigError(Problem("", "parallel.ddp.compression", message))
    if options.compression != "powersgd":
        is_fp16 = options.compression == "fp16"
        hook = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.bf16_compress_hook
        module.register_comm_hook(None, hook)
        return None
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=options.powersgd.rank,
        start_powerSGD_iter=options.powersgd.start_step,
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def reset() -> None:
        """Clear PowerSGD's memory, in which a gradient that was not finite would corrupt all later ones."""
        state.error_dict.clear()
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()

    return reset
