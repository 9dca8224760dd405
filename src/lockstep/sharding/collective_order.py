"""The order in which a rank issues the collectives of a forward and backward, compared with other ranks' order.

                        is compared with                             messages
    first such pass     what all others do at the same point         one of 8 bytes for each collective
    later ones          what this rank did in the first              none
    one that differs    others, over the store: all do the same      none that waits for a rank in a collective

A collective is a number here, the same on all ranks. It is compared before it is issued: no rank waits in one that
others never join, and none is mistaken for another of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.collectives import group_or_all

END = 0
"""The number for the end of a forward or a pass."""

_KEY = "parallel.ddp.find_unused_parameters"
_EVALUATION = "evaluation"
_OTHERS_WAIT = timedelta(seconds=5)
"""How long to wait for others: the collective before has brought all ranks to nearly the same point."""


class NumberExchange:
    """Exchanges one number between the ranks of a group.

    Args:
        group: None: all ranks.

    Attributes:
        ranks: Their numbers among all.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group_or_all(group)
        self._device = device
        self.ranks: list[int] = (
            dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        )

    def exchange(self, number: int) -> list[int]:
        """Return each rank's number."""
        own = torch.tensor([number], device=self._device)
        numbers = own.new_empty(len(self.ranks))
        self._group.concatenate(own, numbers)
        return cast("list[int]", numbers.tolist())


class CollectiveOrder:
    """Raises ConfigError on a collective that other ranks don't issue at the same point, before it is issued.

    Args:
        strategy: Keeps the keys in the store apart from another strategy's.
        describe: Returns what a rank did, of a number ("gathered blocks.1").
        remedy: The remedy that the refusal names.
    """

    def __init__(self, strategy: str, ranks: NumberExchange, describe: Callable[[int], str], remedy: str) -> None:
        self._exchange = ranks
        self._describe_number = describe
        self._remedy = remedy
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._now: list[int] = []
        self._learns = False
        self._passes = 0
        self._strategy = strategy
        self._prefix = ""

    @property
    def in_pass(self) -> bool:
        """True while a pass has begun and not ended."""
        return self._kind is not None

    def begin(self, kind: str) -> None:
        """Begin a pass; those of one kind issue the same collectives."""
        self._kind, self._now, self._passes = kind, [], self._passes + 1
        self._learns = kind not in self._known
        if not self._prefix:  # no rank ends, and the store with it, before all have been in the first collective
            self._prefix = _own_prefix(self._strategy, self._exchange.ranks[0])

    def begin_forward(self) -> None:
        """Begin a forward of the whole model; without gradients it is a pass by itself."""
        if self._kind is None and not torch.is_grad_enabled():
            self.begin(_EVALUATION)

    def end_forward(self) -> None:
        """End a forward of the whole model."""
        if self._kind == _EVALUATION:
            self.end()
        else:
            self.see(END)

    def end(self) -> None:
        """End a pass."""
        self.see(END)
        if self._learns and self._kind is not None:
            self._known[self._kind] = self._now
        self._kind = None

    def see(self, number: int) -> None:
        """Compare a collective that is about to be issued, or the end."""
        if self._kind is None:  # a forward outside of training and evaluation
            return
        if not self._learns:
            known, index = self._known[self._kind], len(self._now)
            if index >= len(known) or known[index] != number:
                if not self._all_differ_alike(number):
                    raise self._changed(known[index] if index < len(known) else END, number)
                self._learns = True
        if self._learns:
            self._compare(self._exchange.exchange(number))
        self._now.append(number)

    def _compare(self, numbers: Sequence[int]) -> None:
        other = next((index for index, number in enumerate(numbers) if number != numbers[0]), None)
        if other is None:
            return
        first, second = self._describe(numbers[0]), self._describe(numbers[other])
        ranks = self._exchange.ranks
        raise self._refusal(f"rank {ranks[0]} {first} where rank {ranks[other]} {second}")

    def _changed(self, known: int, number: int) -> ConfigError:
        return self._refusal(
            f"rank {dist.get_rank()} {self._describe(number)} where in its first such pass it {self._describe(known)}, "
            "as other ranks still do"
        )

    def _describe(self, number: int) -> str:
        return "was done" if number == END else self._describe_number(number)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(Problem("", _KEY, f"false, but samples decide which modules run: {what}. {self._remedy}"))

    def _all_differ_alike(self, number: int) -> bool:
        """Return whether all ranks leave the known order at this point in the same way, which is no fault. Ranks that
        keep to it are in a collective, and post nothing."""
        store = dist.distributed_c10d._get_default_store()
        point = f"{self._prefix}/{self._passes}/{len(self._now)}"
        keys = [f"{point}/{rank}" for rank in self._exchange.ranks]
        store.set(f"{point}/{dist.get_rank()}", str(number))
        try:
            store.wait(keys, _OTHERS_WAIT)
        except RuntimeError:  # torch's DistStoreError: they haven't come
            return False
        return all(store.get(key) == str(number).encode() for key in keys)


def _own_prefix(strategy: str, first: int) -> str:
    """Return a prefix of keys in the store that no earlier session of these ranks has used."""
    prefix = f"lockstep/{strategy} order/{first}"
    sessions = dist.distributed_c10d._get_default_store().add(f"{prefix}/sessions of {dist.get_rank()}", 1)
    return f"{prefix}/session {sessions}"
