"""One order of collectives where samples leave modules or parameters out: experts, branches, skipped layers.

                          rank 0      rank 1              under fixed_order          under NegotiatedOrder
    gather                blocks.1    blocks.2            ConfigError, at once       rank 1 joins blocks.1 first
    reduce                blocks.1    - (left it out)     ConfigError, on rank 1     rank 1 joins, with zeros
    after the update      a parameter that no rank used   can't be                   no gradient, as on one rank

NegotiatedOrder (`find_unused_parameters: true`) agrees on each collective before it: one small message each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.collectives import group_or_all
from lockstep.sharding.collective_order import END, CollectiveOrder, NumberExchange, allow_unused
from lockstep.sharding.fsdp_units import FSDPUnit, refuse_without_zeros, units_of
from lockstep.sharding.single import unused_parameters

if TYPE_CHECKING:
    from lockstep.sharding.context import ShardingContext
    from lockstep.sharding.parameter_shards import ParameterShard


def fixed_order(context: ShardingContext) -> CollectiveOrder:
    """Return an order that refuses a collective that other data-parallel ranks don't issue at the same point."""
    units, remedy = units_of(context.model), context.unused_remedy
    by_number = {unit.number: unit for unit in units}
    names = {id(parameter): name for name, parameter in context.model.named_parameters()}

    def describe(number: int) -> str:
        unit = by_number[(number - 1) // 2]
        return f"gathered {unit}" if number % 2 else f"reduced the gradients of {unit}"

    why = (
        f"Under fsdp all ranks must gather the same modules in the same order. {allow_unused(remedy)}, at a small "
        "message for each that is gathered; under parallel.fsdp.wrap: root there is one to gather"
    )
    ranks = NumberExchange(context.position.data_parallel_group, context.world.device)
    order = CollectiveOrder("fsdp", ranks, describe, why)

    def gather(unit: FSDPUnit) -> None:
        order.see(2 * unit.number + 1)

    def reduce(unit: FSDPUnit, used: Sequence[Tensor]) -> None:
        if not order.in_pass:
            return
        if len(used) < len(unit.trained):
            present = {id(parameter) for parameter in used}
            unused = [names[id(parameter)] for parameter in unit.trained if id(parameter) not in present]
            where = f"on rank {dist.get_rank()}, and others may wait for it"
            raise unused_parameters(unused, where=where, remedy=remedy)
        if used:
            order.see(2 * unit.number + 2)

    for unit, module in units.items():
        unit.watch(module, gather, reduce)
    return order


class NegotiatedOrder:
    """Agrees with other ranks of `group` on each collective; one that doesn't need it joins.

    Called as `CollectiveOrder`.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        refuse_without_zeros()
        units = units_of(model)
        self._by_number = {unit.number: unit for unit in units}
        self._ranks = group_or_all(group).host()
        self._backward = False
        self._used: set[int] = set()
        for unit, module in units.items():
            unit.watch(module, self._gather, self._reduce)

    def begin(self, *, last: bool) -> None:
        self._backward = False

    def begin_forward(self) -> None:
        pass

    def end_forward(self) -> None:
        """Take part in the gathers that other ranks' forwards still need."""
        self._join_until(END)
        self._backward = torch.is_grad_enabled()

    def end(self) -> None:
        """Take part in the gathers and reductions that other ranks' backwards still need."""
        self._join_until(END)
        self._backward = False

    def clear_unused(self, shards: Sequence[ParameterShard]) -> None:
        """Clear the gradient of parameters that no rank has used in this update. All ranks together."""
        if not shards:
            return
        own = bytes(id(shard.whole) in self._used for shard in shards)
        used = map(any, zip(*cast("list[bytes]", self._ranks.gather(own)), strict=True))
        for shard, is_used in zip(shards, used, strict=True):
            if not is_used:
                shard.whole.grad = None
        self._used.clear()

    def _gather(self, unit: FSDPUnit) -> None:
        self._join_until(2 * unit.number + 1)

    def _reduce(self, unit: FSDPUnit, used: Sequence[Tensor]) -> None:
        self._used.update(id(parameter) for parameter in used)
        unit.send_zeros(bool(used))
        if used:
            self._join_until(2 * unit.number + 2)

    def _join_until(self, own: int) -> None:
        """Take part in others' collectives until it is `own`'s turn, or, at the end, until no rank needs any."""
        while (chosen := first_collective(self._ranks.numbers(own), backward=self._backward)) != own:
            unit = self._by_number[(chosen - 1) // 2]
            if chosen % 2:
                unit.gather_for_others()
            else:
                unit.reduce_for_others()


def first_collective(wanted: Sequence[int], *, backward: bool) -> int:
    """Return the collective that comes first: gathers before reductions, in the order of the pass."""
    gathers = [number for number in wanted if number % 2]
    candidates = gathers or [number for number in wanted if number != END]
    return (max if backward else min)(candidates, default=END)
