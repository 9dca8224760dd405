"""One order of collectives where samples leave modules or parameters out: experts, branches, skipped layers.

FSDP's ranks must issue the same gathers and reductions in the same order. Where samples decide which modules run, they
don't: a rank hangs, or two units of one size are mistaken for each other.

                          rank 0      rank 1              under FixedOrder           under NegotiatedOrder
    gather                blocks.1    blocks.2            ConfigError, at once       rank 1 joins blocks.1 first
    reduce                blocks.1    - (left it out)     ConfigError, on rank 1     rank 1 joins, with zeros
    after the update      a parameter that no rank used   can't be                   no gradient, as on one rank

FixedOrder (the default) compares ranks in the first update alone; later each rank compares with what it did then, which
costs no message. NegotiatedOrder (`find_unused_parameters: true`) agrees on each collective before it: one small
message each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.collectives import gloo_group, group_or_all
from lockstep.sharding.collective_order import END, CollectiveOrder, NumberExchange
from lockstep.sharding.fsdp_units import FSDPUnit, refuse_without_zeros, units_of
from lockstep.sharding.single import unused_parameters

if TYPE_CHECKING:
    from lockstep.sharding.parameter_shards import ParameterShard


class SameOrder(Protocol):
    """Keeps the collectives of FSDP's ranks in one order."""

    def begin(self, *, reduces: bool) -> None:
        """Begin a micro-batch; `reduces`: gradients are reduced in its backward."""

    def begin_forward(self) -> None:
        """Begin a forward of the whole model, in a micro-batch or in evaluation."""

    def end_forward(self) -> None:
        """End a forward of the whole model."""

    def end_backward(self) -> None:
        """End the backward of a micro-batch."""

    def end_update(self, shards: Sequence[ParameterShard]) -> None:
        """End the last backward of an update."""


class FixedOrder:
    """Refuses a collective that other ranks don't issue at the same point, before it is issued.

    Args:
        group: The ranks that share the model; None: all.
        device: Where they compute.
        unused_remedy: See `ShardingContext.unused_remedy`.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device, unused_remedy: str
    ) -> None:
        self._unused_remedy = unused_remedy
        self._units = units_of(model)
        self._by_number = {unit.number: unit for unit in self._units}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        remedy = f"{unused_remedy}write true"
        self._order = CollectiveOrder(
            "fsdp",
            NumberExchange(group, device),
            self._describe,
            "Under fsdp all ranks must gather the same modules in the same order. "
            f"{remedy[0].upper()}{remedy[1:]}, which lets ranks leave modules out, at a small message for each that "
            "is gathered; under parallel.fsdp.wrap: root there is one to gather",
        )
        for unit, module in self._units.items():
            unit.watch(module, self)

    def begin(self, *, reduces: bool) -> None:
        """See `SameOrder`."""
        self._order.begin("last" if reduces else "accumulated")

    def begin_forward(self) -> None:
        """See `SameOrder`."""
        self._order.begin_forward()

    def end_forward(self) -> None:
        """See `SameOrder`."""
        self._order.end_forward()

    def end_backward(self) -> None:
        """See `SameOrder`."""
        self._order.end()

    def end_update(self, shards: Sequence[ParameterShard]) -> None:
        """Do nothing."""

    def gather(self, unit: FSDPUnit) -> None:
        """See `UnitObserver`."""
        self._order.see(2 * unit.number + 1)

    def reduce(self, unit: FSDPUnit, used: Sequence[Tensor]) -> None:
        """See `UnitObserver`."""
        if not self._order.in_pass:
            return
        if len(used) < len(unit.trained):
            present = {id(parameter) for parameter in used}
            raise unused_parameters(
                [self._names[id(parameter)] for parameter in unit.trained if id(parameter) not in present],
                where=f"on rank {dist.get_rank()}, and others may wait for it",
                remedy=self._unused_remedy,
            )
        if used:
            self._order.see(2 * unit.number + 2)

    def _describe(self, number: int) -> str:
        unit = self._by_number[(number - 1) // 2]
        return f"gathered {unit}" if number % 2 else f"reduced the gradients of {unit}"


class NegotiatedOrder:
    """Agrees with the other ranks on each collective before it is issued; a rank that doesn't need it takes part, too.

    Args:
        group: The ranks that share the model; None: all.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._units = units_of(model)
        refuse_without_zeros(list(self._units.values()))
        self._by_number = {unit.number: unit for unit in self._units}
        self._group = group_or_all(group)
        self._ranks = NumberExchange(gloo_group(group), torch.device("cpu"))
        self._backward = False
        self._used: set[int] = set()
        for unit, module in self._units.items():
            unit.watch(module, self)

    def begin(self, *, reduces: bool) -> None:
        """See `SameOrder`."""
        self._backward = False

    def begin_forward(self) -> None:
        """Do nothing."""

    def end_forward(self) -> None:
        """Take part in what other ranks' forwards still gather."""
        self._join_until(END)
        self._backward = torch.is_grad_enabled()

    def end_backward(self) -> None:
        """Take part in what other ranks' backwards still gather and reduce."""
        self._join_until(END)
        self._backward = False

    def end_update(self, shards: Sequence[ParameterShard]) -> None:
        """Clear the gradient of parameters that no rank has used in this update. All ranks together."""
        if not shards:
            return
        used = torch.tensor([float(id(shard.whole) in self._used) for shard in shards], device=shards[0].local.device)
        self._group.sum(used)
        for shard, somewhere in zip(shards, used.tolist(), strict=True):
            if not somewhere:
                shard.whole.grad = None
        self._used.clear()

    def gather(self, unit: FSDPUnit) -> None:
        """See `UnitObserver`."""
        self._join_until(2 * unit.number + 1)

    def reduce(self, unit: FSDPUnit, used: Sequence[Tensor]) -> None:
        """See `UnitObserver`."""
        self._used.update(id(parameter) for parameter in used)
        unit.send_zeros(bool(used))
        if used:
            self._join_until(2 * unit.number + 2)

    def _join_until(self, own: int) -> None:
        """Take part in others' collectives until it is `own`'s turn, or, at the end, until no rank wants any."""
        while (chosen := self._chosen(self._ranks.exchange(own))) != own:
            unit = self._by_number[(chosen - 1) // 2]
            if chosen % 2:
                unit.gather_for_others()
            else:
                unit.reduce_for_others()

    def _chosen(self, wanted: Sequence[int]) -> int:
        """Return the collective that comes first: gathers before reductions, in the order of the pass."""
        gathers = [number for number in wanted if number % 2]
        open_ = gathers or [number for number in wanted if number != END]
        return (max if self._backward else min)(open_, default=END)
