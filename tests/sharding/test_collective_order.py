"""The order of collectives, compared between ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from kit.small import in_group
from kit.worlds import in_world

from lockstep.core.errors import ConfigError
from lockstep.sharding.collective_order import CollectiveOrder, NumberExchange


def order() -> CollectiveOrder:
    return CollectiveOrder(
        "fsdp", NumberExchange(None, torch.device("cpu")), lambda number: f"gathered {number}", "Write true"
    )


def train(compared: CollectiveOrder, *numbers: int) -> None:
    compared.begin("last")
    for number in numbers:
        compared.see(number)
    compared.end()


def sessions_after_each_other() -> None:
    with in_group():
        for number in (5, 6, 7):
            compared = order()
            train(compared, 4)
            time.sleep(0.2 * dist.get_rank())
            train(compared, number)


def test_a_changed_order_is_compared_with_that_of_the_same_session() -> None:
    """Not with what a rank posted in the session before, at the same place."""
    in_world(2, sessions_after_each_other)


def differing_in_a_later_pass() -> str:
    with in_group():
        compared = order()
        train(compared, 4, 5)
        if dist.get_rank() == 1:
            with pytest.raises(ConfigError) as raised:
                train(compared, 4, 6)
            return str(raised.value)
        return ""


def test_a_rank_that_differs_by_itself_is_refused_before_it_waits() -> None:
    assert "rank 1 gathered 6 where in its first such pass it gathered 5" in in_world(2, differing_in_a_later_pass)[1]
