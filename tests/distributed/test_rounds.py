"""Ranks meet in a round of their own, whatever earlier ones have left in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.distributed.rounds import RoundTimeout, next_round


def meet(store: dist.Store, ranks: Sequence[int], size: int, limit: float = 20.0) -> dict[int, Any]:
    """The round's name, or the error, of each of some ranks, which meet in threads."""
    names: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            names[rank] = next_round(store, rank, size, limit)
        except RoundTimeout as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 2, 4), (1, 5, 64)])
def test_each_round_has_one_name_that_no_other_has(sizes: Sequence[int]) -> None:
    store = dist.HashStore()
    rounds = [meet(store, range(size), size) for size in sizes]
    assert [len(set(names.values())) for names in rounds] == [1] * len(sizes)
    assert len({names[0] for names in rounds}) == len(sizes)


def test_ranks_that_ended_while_they_asked_are_not_waited_for() -> None:
    store = dist.HashStore()
    assert set(meet(store, [1, 2], 3, limit=0.1).values()) == {"rank 0 did not answer"}
    names = meet(store, [0, 1, 2], 3)
    assert len(set(names.values())) == 1


def test_a_rank_0_that_ended_after_it_had_answered() -> None:
    """Its name is known to the others, and is never the round's."""
    store = dist.HashStore()
    first = meet(store, [0, 1], 3, limit=0.2)
    assert first == {0: "ranks 1 and 2 did not come", 1: "rank 0 did not answer"}
    names = meet(store, [0, 1, 2], 3)
    assert len(set(names.values())) == 1


def test_a_rank_that_an_ended_rank_0_has_answered_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.distributed.rounds._ASK_AGAIN", 0.2)
    store, names = dist.HashStore(), {}
    thread = threading.Thread(target=lambda: names.update(meet(store, [1], 3)))
    thread.start()
    time.sleep(0.05)
    token = store.get("ask/1").decode()
    store.set(f"answer/{token}", "a name of a rank 0 that has ended since")
    names.update(meet(store, [0, 2], 3))
    thread.join()
    assert len(set(names.values())) == 1


def test_who_is_missing_is_named() -> None:
    assert meet(dist.HashStore(), [0], 12, limit=0.05) == {0: "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not come"}
