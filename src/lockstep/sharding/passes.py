"""Collectives of a forward and backward, in the order in which a rank makes them, compared with other ranks' order.

                        what is compared with                        messages
    first such pass     what all others do at the same place         one of 8 bytes for each collective
    later ones          what this rank did in the first              none
    one that differs    others, over the store: all do so together   none that waits for a rank in a collective

A collective is a number here, the same on all ranks. It is compared before it is made: no rank waits in one that others
never join, and none is taken for another of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from lockstep.core.errors import ConfigError, Problem

END = 0
"""Of a forward or a pass: no collective comes."""

_KEY = "parallel.ddp.find_unused_parameters"
_EVALUATION = "evaluation"
_OTHERS_WAIT = timedelta(seconds=5)
"""The collective before has brought all ranks to nearly the same place."""


class Ranks:
    """Exchanges one number with each of the others."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.numbers: list[int] = (
            dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        )

    def exchange(self, number: int) -> list[int]:
        mine = torch.tensor([number], device=self._device)
        found = mine.new_empty(len(self.numbers))
        dist.all_gather(list(found.view(-1, 1)), mine, group=self._group)
        return cast("list[int]", found.tolist())


class Passes:
    """Raises ConfigError, before it is made, on a collective that other ranks don't make at the same place.

    Args:
        strategy: of these ranks; one name in the store.
        what: of a number, what a rank did ("gathered blocks.1").
        remedy: what the refusal says to do.
    """

    def __init__(self, strategy: str, ranks: Ranks, what: Callable[[int], str], remedy: str) -> None:
        self._ranks = ranks
        self._of_number = what
        self._remedy = remedy
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._now: list[int] = []
        self._learns = False
        self._begun = 0
        self._strategy = strategy
        self._place = ""

    @property
    def under_way(self) -> bool:
        return self._kind is not None

    def begin(self, kind: str) -> None:
        """A pass comes; those of one kind make the same collectives."""
        self._kind, self._now, self._begun = kind, [], self._begun + 1
        self._learns = kind not in self._known
        if not self._place:  # no rank ends, and the store with it, before all have been in the first collective
            self._place = _own_place(self._strategy, self._ranks.numbers[0])

    def begin_forward(self) -> None:
        """Of the whole model: one that nobody trains with is a pass by itself."""
        if self._kind is None and not torch.is_grad_enabled():
            self.begin(_EVALUATION)

    def end_forward(self) -> None:
        if self._kind == _EVALUATION:
            self.end()
        else:
            self.see(END)

    def end(self) -> None:
        self.see(END)
        if self._learns and self._kind is not None:
            self._known[self._kind] = self._now
        self._kind = None

    def see(self, number: int) -> None:
        """A collective comes, or the end."""
        if self._kind is None:  # a forward that nobody trains or evaluates with
            return
        if not self._learns:
            known, place = self._known[self._kind], len(self._now)
            if place >= len(known) or known[place] != number:
                if not self._all_do_so(number):
                    raise self._changed(known[place] if place < len(known) else END, number)
                self._learns = True
        if self._learns:
            self._compare(self._ranks.exchange(number))
        self._now.append(number)

    def _compare(self, numbers: Sequence[int]) -> None:
        other = next((at for at, number in enumerate(numbers) if number != numbers[0]), None)
        if other is None:
            return
        what = (self._what(numbers[0]), self._what(numbers[other]))
        ranks = self._ranks.numbers
        raise self._refusal(f"rank {ranks[0]} {what[0]} where rank {ranks[other]} {what[1]}")

    def _changed(self, known: int, number: int) -> ConfigError:
        return self._refusal(
            f"rank {dist.get_rank()} {self._what(number)} where in its first such pass it {self._what(known)}, as "
            "other ranks go on to do"
        )

    def _what(self, number: int) -> str:
        return "was done" if number == END else self._of_number(number)

    def _refusal(self, what: str) -> ConfigError:
        message = f"false, but samples decide which modules run: {what}. {self._remedy}"
        return ConfigError(Problem("", _KEY, message))

    def _all_do_so(self, number: int) -> bool:
        """Whether all ranks leave the order that they know, at this place and in the same way: then it is no fault.
        Those that keep to it are in a collective, and say nothing."""
        store = dist.distributed_c10d._get_default_store()
        ranks = self._ranks.numbers
        place = f"{self._place}/{self._begun}/{len(self._now)}"
        keys = [f"{place}/{rank}" for rank in ranks]
        store.set(f"{place}/{dist.get_rank()}", str(number))
        try:
            store.wait(keys, _OTHERS_WAIT)
        except RuntimeError:  # torch's DistStoreError: they haven't come
            return False
        return all(store.get(key) == str(number).encode() for key in keys)


def _own_place(strategy: str, first: int) -> str:
    """Prefix of keys in the store that no earlier session of these ranks has used."""
    place = f"lockstep/{strategy} order/{first}"
    sessions = dist.distributed_c10d._get_default_store().add(f"{place}/sessions of {dist.get_rank()}", 1)
    return f"{place}/session {sessions}"
