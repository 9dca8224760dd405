"""What DeepSpeed's ranks gather and reduce, compared before it is sent: stages 1 to 3.

    stages 1 to 3    before a reduction    each parameter whose gradient is in it, then that it is sent
    stage 3          before a gather       the module, in the forward and in the backward

DeepSpeed lays the gradients that a rank has one after the other, and sends them: with one missing, lengths differ, or
gradients of one parameter are added to those of another. See `passes` for when ranks exchange what they do.

What is used of DeepSpeed here is private to it: where a bucket of gradients is, and what sends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.sharding.passes import Passes, Ranks

_SENT = 1
_REDUCE_OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


class DeepSpeedOrder:
    """Refuses, before it is made, a collective that other ranks don't make at the same place.

    Args:
        zero: DeepSpeed's optimizer around the model.
        before_unused: as `sharding.state.unused_parameters` has it.
    """

    def __init__(self, zero: Any, stage: int, model: nn.Module, device: torch.device, before_unused: str) -> None:
        self._parameters = [name for name, _ in model.named_parameters()]
        self._modules = [name for name, _ in model.named_modules()]
        self._parameter_at = {id(one): at for at, one in enumerate(model.parameters())}
        self._module_at = {id(one): at for at, one in enumerate(model.modules())}
        remedy = f"{before_unused}write true"
        self._passes = Passes(
            "deepspeed",
            Ranks(None, device),
            self._what,
            "Under deepspeed all ranks must use the same parameters in the same order. "
            f"{remedy[0].upper()}{remedy[1:]}, which lets ranks leave modules out; so does fsdp",
        )
        if stage < 3:
            self._watch_reductions(zero)
            return
        self._watch_reductions_of_stage_3(zero)
        self._watch_gathers(zero.parameter_offload.get_param_coordinator(), model)

    def begin(self, *, last: bool) -> None:
        """A micro-batch's forward and backward come next; `last`: of the update."""
        self._passes.begin("last" if last else "accumulated")

    def end(self) -> None:
        """Of the backward."""
        self._passes.end()

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
        """Each module's: DeepSpeed decides by them what it gathers ahead."""
        plain = coordinator.fetch_sub_module

        def fetch_sub_module(current_submodule: nn.Module, forward: bool) -> None:
            at = self._module_at.get(id(current_submodule))
            if at is not None:
                self._passes.see(3 * at + (2 if forward else 3))
            plain(current_submodule, forward)

        coordinator.fetch_sub_module = fetch_sub_module
        model.register_forward_pre_hook(lambda *_: self._passes.begin_forward(), prepend=True)  # before the gather
        model.register_forward_hook(lambda *_: self._passes.end_forward())

    def _see_sent(self, parameters: Iterator[Any]) -> None:
        for one in parameters:
            self._passes.see(3 * self._parameter_at[id(one)] + 4)
        self._passes.see(_SENT)

    def _what(self, number: int) -> str:
        if number == _SENT:
            return "sent no more"
        at, kind = divmod(number - 2, 3)
        if kind == 2:
            return f"sent the gradient of {self._parameters[at]}"
        module = self._modules[at] or "the model"
        return f"gathered {module}" if kind == 0 else f"gathered {module} for the backward"
