"""Compares the collectives of a forward and backward with other ranks', before they are issued.

first such pass     with all other ranks at the same point    a message of 8 bytes for each collective
later ones          with this rank's first pass               none
one that differs    with others, over the store: all may change alike
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.collectives import group_or_all

END = 0
"""The number for the end of a forward or a pass."""

_OTHERS_WAIT = timedelta(seconds=5)
"""How long to wait for others: the collective before has brought all ranks to nearly the same point."""


class NumberExchange:
    """Exchanges one number between the ranks of a group (None: all); `ranks` are their global ranks."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group_or_all(group)
        self._device = device
        self.ranks: list[int] = dist.get_process_group_ranks(group)

    def exchange(self, number: int) -> list[int]:
        """Return each rank's number."""
        own = torch.tensor([number], device=self._device)
        numbers = own.new_empty(len(self.ranks))
        self._group.concatenate(own, numbers)
        return cast("list[int]", numbers.tolist())


class CollectiveOrder:
    """Raises ConfigError on a collective that other ranks don't issue at the same point, before it is issued.

    Each collective has a number, the same on all ranks.

    Args:
        strategy: Separates the keys in the store.
        describe: Returns what a rank did ("gathered blocks.1").
    """

    def __init__(self, strategy: str, ranks: NumberExchange, describe: Callable[[int], str], remedy: str) -> None:
        self.in_pass = False
        self._exchange = ranks
        self._describe_number = describe
        self._remedy = remedy
        self._known: dict[str, list[int]] = {}
        self._kind = ""
        self._now: list[int] = []
        self._learns = False
        self._passes = 0
        self._strategy = strategy
        self._prefix = ""

    def begin(self, *, last: bool) -> None:
        """Begin a forward and backward; the last of an update may issue other collectives than the ones before."""
        self._begin("last" if last else "accumulated")

    def begin_forward(self) -> None:
        """Begin a forward of the whole model; without gradients it is a pass by itself."""
        if not self.in_pass and not torch.is_grad_enabled():
            self._begin("evaluation")

    def end_forward(self) -> None:
        """End a forward of the whole model."""
        if self.in_pass and self._kind == "evaluation":
            self.end()
        else:
            self.see(END)

    def end(self) -> None:
        """End a pass."""
        self.see(END)
        if self._learns and self.in_pass:
            self._known[self._kind] = self._now
        self.in_pass = False

    def see(self, number: int) -> None:
        """Compare a collective that is about to be issued, or the end."""
        if not self.in_pass:  # a forward outside of training and evaluation
            return
        if not self._learns:
            known, index = self._known[self._kind], len(self._now)
            expected = known[index] if index < len(known) else END
            if index >= len(known) or expected != number:
                if not self._all_differ_alike(number):
                    raise self._refusal(
                        f"rank {dist.get_rank()} {self._describe(number)} where in its first such pass it "
                        f"{self._describe(expected)}, as other ranks still do"
                    )
                self._learns = True
        if self._learns:
            self._compare(self._exchange.exchange(number))
        self._now.append(number)

    def _begin(self, kind: str) -> None:
        self.in_pass, self._kind, self._now = True, kind, []
        self._passes += 1
        self._learns = kind not in self._known
        if not self._prefix:  # now, since the store can't end before all ranks have been in the first collective
            prefix = f"lockstep/{self._strategy} order/{self._exchange.ranks[0]}"
            sessions = dist.distributed_c10d._get_default_store().add(f"{prefix}/sessions of {dist.get_rank()}", 1)
            self._prefix = f"{prefix}/session {sessions}"  # no earlier session of these ranks has used it

    def _compare(self, numbers: list[int]) -> None:
        other = next((index for index, number in enumerate(numbers) if number != numbers[0]), None)
        if other is not None:
            first, second = self._describe(numbers[0]), self._describe(numbers[other])
            ranks = self._exchange.ranks
            raise self._refusal(f"rank {ranks[0]} {first} where rank {ranks[other]} {second}")

    def _describe(self, number: int) -> str:
        return "was done" if number == END else self._describe_number(number)

    def _refusal(self, what: str) -> ConfigError:
        why = f"false, but samples decide which modules run: {what}. {self._remedy}"
        return ConfigError(Problem("", "parallel.ddp.find_unused_parameters", why))

    def _all_differ_alike(self, number: int) -> bool:
        """Return whether all ranks leave the known order here in the same way, which is allowed."""
        store = dist.distributed_c10d._get_default_store()
        point = f"{self._prefix}/{self._passes}/{len(self._now)}"
        keys = [f"{point}/{rank}" for rank in self._exchange.ranks]
        store.set(f"{point}/{dist.get_rank()}", str(number))
        try:
            store.wait(keys, _OTHERS_WAIT)
        except RuntimeError:  # torch's DistStoreError: ranks that keep the order post nothing
            return False
        return all(store.get(key) == str(number).encode() for key in keys)


def allow_unused(unused_remedy: str) -> str:
    """Return the remedy that lets ranks leave modules out; see `ShardingContext.unused_remedy`."""
    sentence = f"{unused_remedy}write true, which lets ranks leave modules out"
    return f"{sentence[0].upper()}{sentence[1:]}"
