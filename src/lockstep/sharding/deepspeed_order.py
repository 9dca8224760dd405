"""Compares DeepSpeed's gathers (stage 3) and reductions (stages 1 to 3) between ranks before they are issued.

DeepSpeed concatenates the gradients that a rank has, and sends them: with one missing, lengths differ, or gradients of
different parameters are added. Uses private names of DeepSpeed, and torch's modes of selective checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from lockstep.sharding.collective_order import CollectiveOrder, NumberExchange, allow_unused

if TYPE_CHECKING:
    from lockstep.sharding.context import ShardingContext

_SENT = 1
_REDUCE_OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


def deepspeed_order(zero: Any, stage: int, context: ShardingContext) -> CollectiveOrder:
    """Return an order that refuses a collective of `zero`, DeepSpeed's optimizer, that other ranks don't issue."""
    model = context.model
    parameters = [name for name, _ in model.named_parameters()]
    modules = [name for name, _ in model.named_modules()]
    parameter_index = {id(parameter): index for index, parameter in enumerate(model.parameters())}

    def describe(number: int) -> str:
        if number == _SENT:
            return "sent no more"
        index, kind = divmod(number - 2, 3)
        if kind == 2:
            return f"sent the gradient of {parameters[index]}"
        module = modules[index] or "the model"
        return f"gathered {module}" if kind == 0 else f"gathered {module} for the backward"

    remedy = f"in the same order. {allow_unused(context.unused_remedy)}; so does fsdp"
    remedy = f"Under deepspeed all ranks must use the same parameters {remedy}"
    order = CollectiveOrder("deepspeed", NumberExchange(None, context.world.device), describe, remedy)

    def see_sent(sent: Iterable[Any]) -> None:
        for parameter in sent:
            order.see(3 * parameter_index[id(parameter)] + 4)
        order.see(_SENT)

    if stage == 3:
        _watch_reductions_of_stage_3(zero, see_sent)
        _watch_gathers(zero.parameter_offload.get_param_coordinator(), model, order)
    else:
        _watch_reductions(zero, see_sent)
    return order


def _watch_reductions(zero: Any, see_sent: Callable[[Iterable[Any]], None]) -> None:
    original = zero.reduce_ipg_grads

    def reduce_ipg_grads(comm_dtype: torch.dtype | None = None) -> None:
        for dtype in sorted(zero.ipg_buckets, key=str) if comm_dtype is None else [comm_dtype]:
            see_sent(zero.bit16_groups[group][index] for group, index, _ in zero.ipg_buckets[dtype].params)
        original(comm_dtype=comm_dtype)

    zero.reduce_ipg_grads = reduce_ipg_grads


def _watch_reductions_of_stage_3(zero: Any, see_sent: Callable[[Iterable[Any]], None]) -> None:
    original = getattr(zero, _REDUCE_OF_STAGE_3)

    def reduce_and_partition(dtype: torch.dtype) -> None:
        see_sent(zero.ipg_buckets[dtype].params)
        original(dtype)

    setattr(zero, _REDUCE_OF_STAGE_3, reduce_and_partition)


def _watch_gathers(coordinator: Any, model: nn.Module, order: CollectiveOrder) -> None:
    """Compare each module's gather: DeepSpeed decides by them what it prefetches.

    DeepSpeed compares them too, once all have been issued; a rank without peers in one waits forever by then.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    module_index = {id(module): index for index, module in enumerate(model.modules())}
    fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module

    def fetch_sub_module(current_submodule: nn.Module, forward: bool) -> None:
        with _unseen_by_checkpointing():
            index = module_index.get(id(current_submodule))
            if index is not None:
                order.see(3 * index + (2 if forward else 3))
            fetch(current_submodule, forward)

    def release_sub_module(submodule: nn.Module, forward: bool = False) -> None:
        with _unseen_by_checkpointing():
            release(submodule, forward)

    coordinator.fetch_sub_module, coordinator.release_sub_module = fetch_sub_module, release_sub_module
    model.register_forward_pre_hook(lambda *_: order.begin_forward(), prepend=True)  # before the gather
    model.register_forward_hook(lambda *_: order.end_forward())


@contextmanager
def _unseen_by_checkpointing() -> Iterator[None]:
    """Hide operations from selective checkpointing: a parameter gathered early may be gathered in a block later."""
    hidden: list[Any] = []
    while isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        hidden.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(hidden):
            _push_mode(mode)
