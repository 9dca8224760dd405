"""The order of collectives: compared between ranks, and negotiated."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kit.failures import gives
from kit.small import in_group
from kit.worlds import in_world

from lockstep.core.errors import ConfigError
from lockstep.sharding import collective_order
from lockstep.sharding.collective_order import END, CollectiveOrder, NumberExchange
from lockstep.sharding.fsdp_order import first_collective


class CountedExchange(NumberExchange):
    """Counts the messages."""

    messages = 0

    def exchange(self, number: int) -> list[int]:
        self.messages += 1
        return super().exchange(number)


def order(ranks: NumberExchange | None = None) -> CollectiveOrder:
    ranks = ranks or NumberExchange(None, torch.device("cpu"))
    return CollectiveOrder("fsdp", ranks, lambda number: f"gathered {number}", "Write true")


def train(compared: CollectiveOrder, *numbers: int, last: bool = True) -> None:
    compared.begin(last=last)
    for number in numbers:
        compared.see(number)
    compared.end()


def evaluate(compared: CollectiveOrder, *numbers: int) -> None:
    with torch.no_grad():
        compared.begin_forward()
        for number in numbers:
            compared.see(number)
        compared.end_forward()


def sessions_after_each_other() -> None:
    with in_group():
        for number in (5, 6, 7):
            compared = order()
            train(compared, 4)
            time.sleep(0.2 * dist.get_rank())
            train(compared, number)


def test_a_changed_order_is_compared_with_that_of_the_same_session() -> None:
    """What a rank of an earlier session posted at the same point doesn't count."""
    in_world(2, sessions_after_each_other)


def refused_on_rank_1(numbers: list[int]) -> str:
    """Return the refusal of a pass in which rank 1 alone leaves the order 4, 5."""
    with in_group():
        collective_order._OTHERS_WAIT = timedelta(seconds=1)
        compared = order()
        train(compared, 4, 5)
        if dist.get_rank() == 1:
            with pytest.raises(ConfigError) as refusal:
                train(compared, *numbers)
            return str(refusal.value)
        return ""


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([4, 6], "rank 1 gathered 6 where in its first such pass it gathered 5, as other ranks still do"),
        ([4], "rank 1 was done where in its first such pass it gathered 5"),
        ([4, 5, 6], "rank 1 gathered 6 where in its first such pass it was done"),
        ([4, 5, END, 6], "rank 1 gathered 6 where in its first such pass it was done"),
    ],
)
def test_a_rank_that_differs_by_itself_is_refused_before_it_waits(numbers: list[int], message: str) -> None:
    assert message in in_world(2, refused_on_rank_1, numbers)[1]


def refused_in_the_first_pass() -> str:
    with in_group(), pytest.raises(ConfigError) as refusal:
        train(order(), 4, 5 + dist.get_rank())
    return str(refusal.value)


def test_ranks_that_differ_in_the_first_pass_are_all_refused() -> None:
    for message in in_world(2, refused_in_the_first_pass):
        assert message.startswith("parallel.ddp.find_unused_parameters: ")
        assert gives(message, "rank 0 gathered 5", "rank 1 gathered 6")


def messages_by_pass() -> list[int]:
    """Return the number of messages after each pass."""
    with in_group():
        ranks = CountedExchange(None, torch.device("cpu"))
        compared, counts = order(ranks), []
        compared.see(9)  # outside of a pass
        for one_pass in (
            lambda: train(compared, 4, 5),
            lambda: train(compared, 4, 5),
            lambda: train(compared, 4, last=False),
            lambda: evaluate(compared, 4),
            lambda: train(compared, 4, last=False),
            lambda: evaluate(compared, 4),
            lambda: train(compared, 4, 6),  # all ranks change it alike
            lambda: train(compared, 4, 6),
        ):
            one_pass()
            counts.append(ranks.messages)
        return counts


def test_a_kind_of_pass_costs_messages_once_and_again_where_all_ranks_change_it_alike() -> None:
    for counts in in_world(2, messages_by_pass):
        assert counts == [3, 3, 5, 7, 7, 7, 9, 9]


@pytest.mark.parametrize(
    ("wanted", "backward", "chosen"),
    [
        ([5, 3, END], False, 3),  # the next gather of the forward
        ([5, 3, END], True, 5),  # which the backward meets in reverse
        ([4, 7], False, 7),  # a gather comes before a reduction
        ([4, 7], True, 7),
        ([4, 6, END], True, 6),
        ([END, END], True, END),
    ],
)
def test_negotiating_ranks_issue_gathers_before_reductions_in_the_order_of_the_pass(
    wanted: list[int], backward: bool, chosen: int
) -> None:
    assert first_collective(wanted, backward=backward) == chosen
