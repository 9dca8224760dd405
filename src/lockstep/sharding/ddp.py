"""DistributedDataParallel: every rank holds everything; gradients are reduced while the backward runs.

rank 0   model, gradient ---.                      .--> optimizer     the same update everywhere
rank 1   model, gradient ---+-- bucket by bucket --+--> optimizer
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
from lockstep.core.protocols import NO_CONTEXT, GradientStep
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.context import Builder, Sharding, ShardingContext
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.single import (
    named_gradients,
    present_gradients,
    run_backward,
    trainable_parameters,
    unused_parameters,
    without_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.schema import DDP
    from lockstep.core.protocols import Optimizer


T = TypeVar("T")
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""Part of torch's message; indices into the trained parameters in the reducer's order."""


class DDPStep(GradientStep):
    """The step of ranks with gradients averaged by DDP."""

    def __init__(self, context: ShardingContext, optimizer: Optimizer, buffers: SyncedBuffers) -> None:
        model, world, options = context.model, context.world, context.config.parallel.ddp
        accumulates = context.plan.batch.accumulation > 1
        self._model = model
        self._ranks = world.axis.size
        self._clock, self._reduced = world.clock, world.reduced
        self._begin_waiting = partial(world.clock.enter, Phase.COMMUNICATION)
        self._optimizer = optimizer
        self._parameters = trainable_parameters(model)
        self._squared_norm = context.squared_norm
        self._in_buckets = _InBuckets(self._parameters) if accumulates and options.gradient_as_bucket_view else None
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters
        # until torch 2.12
        sync = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        make = partial(
            _InOrder,
            model,
            device_ids=None if world.device.type == "cpu" else [world.device.index],
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            bucket_cap_mb=options.bucket_mb,
            init_sync=context.has_values,  # others follow, the same on all ranks
            **{sync: bool(buffers)},  # type: ignore[arg-type]
        )
        self._ddp = make() if self._in_buckets is None else self._in_buckets.renew(make)
        self.module = self._ddp
        self._buffers = buffers
        self._learns_graph = options.static_graph
        narrow = context.config.precision.parameters == "bf16"
        self._hook, self._memory = _hook(options, world.backend, accumulates, narrow)
        if self._hook is not None:
            self._hook.register(self._ddp)
        is_seen = self._hook is not None  # hooks are in Python, where collectives are counted
        self._reduced_bytes = 0 if is_seen else sum(each.numel() * each.element_size() for each in self._parameters)
        self._unused_remedy = "leave parallel.ddp.static_graph out and " if options.static_graph else ""
        self._reduces = True
        # of the gradient that comes first, before it is reduced
        self._mark = self._parameters[-1].register_hook(self._mark_reduction)  # type: ignore[no-untyped-call]

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        self._reduces = last
        if self._buffers and self._ddp.copies_buffers(self._buffers.begins_update(last)):
            self._buffers.prepare()
        sync, self._learns_graph = last or self._learns_graph, False
        if self._hook is not None:
            self._hook.active = last
        if last:
            self._reduced.size += self._reduced_bytes
        if self._in_buckets is not None:
            self._in_buckets.active = not sync
        return NO_CONTEXT if sync else self._ddp.no_sync()

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        run_backward(loss, seed)
        if self._reduces:
            self._clock.enter(Phase.BACKWARD)
            self._refuse_unreduced()

    def _mark_reduction(self, gradient: Tensor) -> None:
        """Let the clock count what DDP does at the backward's end, when it waits for its buckets, as communication.

        The engine's callbacks run in the order of the queue, and DDP queues its own at the last bucket.
        """
        if self._reduces:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._begin_waiting)

    def parameters_without_gradient(self) -> list[str]:
        return without_gradient(self._model)

    def _refuse_unreduced(self) -> None:
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch does in the next forward, after the hang
        except RuntimeError as error:
            trained = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
            if indices := _WITHOUT_GRADIENT.search(str(error)):
                numbered = self._ddp.in_order(trained)
                names = self._ddp.in_order([numbered[int(index)] for index in indices[1].split()])
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
        if self._memory is not None and not keep:
            for name in ("error_dict", "p_memory_dict", "q_memory_dict"):  # of a gradient that was not finite
                getattr(self._memory, name).clear()

    def close(self) -> None:
        self._mark.remove()
        if self._in_buckets is not None:
            self._in_buckets.close()
        # A DDP module that outlives its group keeps the group: see `RankGroup.close`
        self._ddp = self.module = cast("_InOrder", None)


class _InOrder(DistributedDataParallel):
    """DDP with the same buckets in every update: parameters in the reverse of their order in the model.

    torch's first update has one bucket, and later ones the order of the first backward. An all-reduce adds the ranks'
    numbers in an order that depends on their place in the bucket, so a resumed run's first update would have other
    bits.
    """

    def _ddp_init_helper(
        self, parameters: list[Tensor], expect_sparse: list[bool], names: dict[int, str], static_graph: bool
    ) -> None:
        """Make the reducer; torch's constructor calls this."""
        self._has_fixed_buckets = self.find_unused_parameters and not static_graph  # torch's are, in the same order
        names = dict(enumerate(self.in_order(list(names.values())))) if names else names
        super()._ddp_init_helper(  # type: ignore[no-untyped-call]
            self.in_order(parameters), self.in_order(expect_sparse), names, static_graph
        )
        self.reducer._push_all_rebuilt_params()  # as if the first backward had reached them in this order
        self.reducer._rebuild_buckets()

    def copies_buffers(self, begins_update: bool) -> bool:
        """Return whether the next forward begins with the first rank's buffers: only in an update's first micro-batch.

        With a static graph, torch's would in the first two of a run.
        """
        self.require_forward_param_sync = begins_update
        if not self.modules_buffers:  # torch looks for new ones whenever it copies some
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        return begins_update

    def in_order(self, parameters: list[T]) -> list[T]:
        """Return what belongs to trained parameters, in the order of the reducer's numbers."""
        return parameters if self._has_fixed_buckets else parameters[::-1]


class _InBuckets:
    """Accumulates the gradients of micro-batches in DDP's buckets.

    DDP moves gradients there only in the last micro-batch, so that two copies of all would exist.

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
            if parameter.grad is not None and parameter.grad is not zero:  # sparse gradients have no view
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
    model = context.model
    optimizer, buffers = context.optimizer(model.named_parameters()), SyncedBuffers(model)
    return Sharding(DDPStep(context, optimizer, buffers), ModelState(model, optimizer, buffers=buffers))


BUILDER = Builder(build)


class _Hook:
    """Reduces a bucket of DDP, in the last micro-batch of an update, while `active`.

    DDP learns a static graph in the first backward of all, which it must synchronize (torch 2.13 asserts it). If that
    isn't the last micro-batch of its update, gradients stay as they are.
    """

    def __init__(self, reduce: Callable[[Any, Any], Any], state: object = None) -> None:
        self.active = True
        self._reduce, self._state = reduce, state

    def register(self, module: DistributedDataParallel) -> None:
        # a function without annotations: torch compares them with types, and here they are text
        module.register_comm_hook(self._state, lambda state, bucket: self._reduced(state, bucket))

    def _reduced(self, state: Any, bucket: Any) -> Any:
        if self.active:
            return self._reduce(state, bucket)
        unchanged: torch.futures.Future[Tensor] = torch.futures.Future()
        unchanged.set_result(bucket.buffer())
        return unchanged


def _hook(options: DDP, backend: str, accumulates: bool, narrow: bool) -> tuple[_Hook | None, Any]:
    if options.compression == "none" and not narrow and not (options.static_graph and accumulates):
        return None, None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if options.compression == "bf16" and backend == "gloo":
        message = "gloo has no bf16 all-reduce; fp16 and powersgd run on it, bf16 on nccl"
        raise ConfigError(Problem("", "parallel.ddp.compression", message))
    if options.compression == "none" and narrow:  # a sum of bf16 would be rounded by each rank, and gloo has none
        widen = cast("Any", default_hooks)._compress_hook
        return _Hook(lambda state, bucket: widen(torch.float32, None, bucket)), None
    if options.compression != "powersgd":
        name = "allreduce_hook" if options.compression == "none" else f"{options.compression}_compress_hook"
        return _Hook(getattr(default_hooks, name)), None
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=options.powersgd.rank,
        start_powerSGD_iter=options.powersgd.start_step,
    )
    return _Hook(powerSGD_hook.powerSGD_hook, state), state
