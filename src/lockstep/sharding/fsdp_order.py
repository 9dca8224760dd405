"""Samples that leave modules or parameters out: experts, branches, skipped layers.

FSDP's ranks must issue the same gathers and reductions in the same order. Where samples decide which modules run, they
don't by themselves: a rank waits for ever, or two units of one size are taken for each other.

                          rank 0      rank 1              under OneOrder             under Joined
    gather                blocks.1    blocks.2            ConfigError, at once       rank 1 joins blocks.1 first
    reduce                blocks.1    - (left it out)     ConfigError, on rank 1     rank 1 joins, with zeros
    after the update      a parameter that no rank used   can't be                   no gradient, as on one rank

OneOrder (the default) compares ranks in the first update alone; later each rank compares with what it did then, which
costs no message. Joined (`find_unused_parameters: true`) agrees on each collective before it: one small message each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.sharding.fsdp_units import Unit, refuse_without_zeros, units_of
from lockstep.sharding.passes import END, Passes, Ranks
from lockstep.sharding.state import unused_parameters

if TYPE_CHECKING:
    from lockstep.sharding.local_parts import Part


class SameOrder(Protocol):
    """Keeps the collectives of FSDP's ranks in one order."""

    def begin(self, *, reduces: bool) -> None:
        """A micro-batch's forward and backward come next; `reduces`: gradients are reduced in them."""

    def begin_forward(self) -> None:
        """Of the whole model, in a micro-batch or in evaluation."""

    def end_forward(self) -> None: ...

    def end_backward(self) -> None: ...

    def end_update(self, parts: Sequence[Part]) -> None: ...


class OneOrder:
    """Refuses, before it is made, a collective that other ranks don't make at the same place.

    Args:
        group: of the ranks that share the model; None: all.
        device: where they compute.
        before_unused: as `sharding.state.unused_parameters` has it.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device, before_unused: str
    ) -> None:
        self._before_unused = before_unused
        self._units = units_of(model)
        self._by_number = {unit.number: unit for unit in self._units}
        self._names = {id(one): name for name, one in model.named_parameters()}
        remedy = f"{before_unused}write true"
        self._passes = Passes(
            "fsdp",
            Ranks(group, device),
            self._what,
            "Under fsdp all ranks must gather the same modules in the same order. "
            f"{remedy[0].upper()}{remedy[1:]}, which lets ranks leave modules out, at a small message for each that "
            "is gathered; under parallel.fsdp.wrap: root there is one to gather",
        )
        for unit, module in self._units.items():
            unit.watch(module, self)

    def begin(self, *, reduces: bool) -> None:
        """See `SameOrder`."""
        self._passes.begin("last" if reduces else "accumulated")

    def begin_forward(self) -> None:
        """See `SameOrder`."""
        self._passes.begin_forward()

    def end_forward(self) -> None:
        """See `SameOrder`."""
        self._passes.end_forward()

    def end_backward(self) -> None:
        """See `SameOrder`."""
        self._passes.end()

    def end_update(self, parts: Sequence[Part]) -> None:
        """See `SameOrder`: nothing is left to do."""

    def gather(self, unit: Unit) -> None:
        """See `fsdp_units.Order`."""
        self._passes.see(2 * unit.number + 1)

    def reduce(self, unit: Unit, used: Sequence[Tensor]) -> None:
        """See `fsdp_units.Order`."""
        if not self._passes.under_way:
            return
        if len(used) < len(unit.trained):
            there = {id(one) for one in used}
            raise unused_parameters(
                [self._names[id(one)] for one in unit.trained if id(one) not in there],
                where=f"on rank {dist.get_rank()}, and others may wait for it",
                before=self._before_unused,
            )
        if used:
            self._passes.see(2 * unit.number + 2)

    def _what(self, number: int) -> str:
        unit = self._by_number[(number - 1) // 2]
        return f"gathered {unit}" if number % 2 else f"reduced the gradients of {unit}"


class Joined:
    """Agrees with the other ranks on each collective before it is made; a rank that doesn't need it joins nevertheless.

    Args:
        group: of the ranks that share the model; None: all.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._units = units_of(model)
        refuse_without_zeros(list(self._units.values()))
        self._by_number = {unit.number: unit for unit in self._units}
        self._group = group
        self._ranks = Ranks(_on_host(group), torch.device("cpu"))
        self._backward = False
        self._agrees = False
        self._used: set[int] = set()
        for unit, module in self._units.items():
            unit.watch(module, self)

    def begin(self, *, reduces: bool) -> None:
        """See `SameOrder`."""
        self._backward = False

    def begin_forward(self) -> None:
        """See `SameOrder`."""

    def end_forward(self) -> None:
        """See `SameOrder`: joins what other ranks' forwards still gather."""
        self._until(END)
        self._backward = torch.is_grad_enabled()

    def end_backward(self) -> None:
        """See `SameOrder`: joins what other ranks' backwards still gather and reduce."""
        self._until(END)
        self._backward = False

    def end_update(self, parts: Sequence[Part]) -> None:
        """Takes the gradient from parameters that no rank has used in this update. All ranks together."""
        if not parts:
            return
        used = torch.tensor([float(id(part.whole) in self._used) for part in parts], device=parts[0].local.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        for part, somewhere in zip(parts, used.tolist(), strict=True):
            if not somewhere:
                part.whole.grad = None
        self._used.clear()

    def gather(self, unit: Unit) -> None:
        """See `fsdp_units.Order`."""
        self._until(2 * unit.number + 1)

    def reduce(self, unit: Unit, used: Sequence[Tensor]) -> None:
        """See `fsdp_units.Order`."""
        self._used.update(id(one) for one in used)
        unit.send_zeros(bool(used))
        if used:
            self._until(2 * unit.number + 2)

    def _until(self, mine: int) -> None:
        """Joins others' collectives until it is this one's turn, or, at the end, until no rank wants any."""
        while (chosen := self._chosen(self._ranks.exchange(mine))) != mine:
            unit = self._by_number[(chosen - 1) // 2]
            if chosen % 2:
                unit.gather_for_others()
            else:
                unit.reduce_for_others()

    def _chosen(self, wanted: Sequence[int]) -> int:
        """Of what ranks want the one that comes first: gathers before reductions, in the order of the pass."""
        gathers = [number for number in wanted if number % 2]
        left = gathers or [number for number in wanted if number != END]
        if not left:
            return END
        return max(left) if self._backward else min(left)


def _on_host(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The same ranks, over gloo: agreeing must not wait for a GPU. All of them together."""
    if dist.get_backend(group) == "gloo":
        return group
    ranks = dist.get_process_group_ranks(group) if group is not None else None
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return cast("dist.ProcessGroup", made)
