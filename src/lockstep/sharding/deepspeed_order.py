"""The gathers and reductions of DeepSpeed's ranks, compared before they are issued: stages 1 to 3.

    stages 1 to 3    before a reduction    each parameter whose gradient is in it, then that it is sent
    stage 3          before a gather       the module, in the forward and in the backward

DeepSpeed concatenates the gradients that a rank has, and sends them: with one missing, lengths differ, or gradients of
one parameter are added to those of another. See `collective_order` for when ranks compare.

What is used of DeepSpeed here is private to it: where a bucket of gradients is, and what sends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.sharding.collective_order import CollectiveOrder, NumberExchange

_SENT = 1
_REDUCE_OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


class DeepSpeedOrder:
    """Refuses a collective that other ranks don't issue at the same point, before it is issued.

    Args:
        zero: DeepSpeed's optimizer around the model.
        unused_remedy: See `ShardingContext.unused_remedy`.
    """

    def __init__(self, zero: Any, stage: int, model: nn.Module, device: torch.device, unused_remedy: str) -> None:
        self._parameters = [name for name, _ in model.named_parameters()]
        self._modules = [name for name, _ in model.named_modules()]
        self._parameter_index = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        self._module_index = {id(parameter): index for index, parameter in enumerate(model.modules())}
        remedy = f"{unused_remedy}write true"
        self._order = CollectiveOrder(
            "deepspeed",
            NumberExchange(None, device),
            self._describe,
            "Under deepspeed all ranks must use the same parameters in the same order. "
            f"{remedy[0].upper()}{remedy[1:]}, which lets ranks leave modules out; so does fsdp",
        )
        if stage < 3:
            self._watch_reductions(zero)
            return
        self._watch_reductions_of_stage_3(zero)
        self._watch_gathers(zero.parameter_offload.get_param_coordinator(), model)

    def begin(self, *, last: bool) -> None:
        """Begin a micro-batch; `last`: of the update."""
        self._order.begin("last" if last else "accumulated")

    def end(self) -> None:
        """End the backward of a micro-batch."""
        self._order.end()

    def _watch_reductions(self, zero: Any) -> None:
        plain = zero.reduce_ipg_grads

        def reduce_ipg_grads(comm_dtype: torch.dtype | None = None) -> None:
            for dtype in sorted(zero.ipg_buckets, key=str) if comm_dtype is None else [comm_dtype]:
                self._see_sent(zero.bit16_groups[group][at] for group, at, _ in zero.ipg_buckets[dtype].params)
            plain(comm_dtype=comm_dtype)

        zero.reduce_ipg_grads = reduce_ipg_grads

    def _watch_reductions_of_stage_3(self, zero: Any) -> None:
        plain = getattr(zero, _REDUCE_OF_STAGE_3)

        def reduce_and_partition(dtype: torch.dtype) -> None:
            self._see_sent(iter(zero.ipg_buckets[dtype].params))
            plain(dtype)

        setattr(zero, _REDUCE_OF_STAGE_3, reduce_and_partition)

    def _watch_gathers(self, coordinator: Any, model: nn.Module) -> None:
        """Compare each module's gather: DeepSpeed decides by them what it prefetches."""
        plain = coordinator.fetch_sub_module

        def fetch_sub_module(current_submodule: nn.Module, forward: bool) -> None:
            index = self._module_index.get(id(current_submodule))
            if index is not None:
                self._order.see(3 * index + (2 if forward else 3))
            plain(current_submodule, forward)

        coordinator.fetch_sub_module = fetch_sub_module
        model.register_forward_pre_hook(lambda *_: self._order.begin_forward(), prepend=True)  # before the gather
        model.register_forward_hook(lambda *_: self._order.end_forward())

    def _see_sent(self, parameters: Iterator[Any]) -> None:
        for parameter in parameters:
            self._order.see(3 * self._parameter_index[id(parameter)] + 4)
        self._order.see(_SENT)

    def _describe(self, number: int) -> str:
        if number == _SENT:
            return "sent no more"
        index, kind = divmod(number - 2, 3)
        if kind == 2:
            return f"sent the gradient of {self._parameters[index]}"
        module = self._modules[index] or "the model"
        return f"gathered {module}" if kind == 0 else f"gathered {module} for the backward"
