"""The partition of a model over ranks: whose gradient counts, what is summed, and how states are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.small import in_group
from kit.worlds import in_world
from torch import nn

from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.collectives import LocalGroup, RankGroup
from lockstep.distributed.mesh_position import TensorParallelGroup
from lockstep.distributed.shard_boxes import FlatShard
from lockstep.sharding.partition import ModelPartition

CPU = torch.device("cpu")
NAMES = ["table", "first", "second", "head"]


class Ranks(LocalGroup):
    """An axis of two ranks that records what is summed."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank  # type: ignore[misc]
        self.summed: list[Any] = []

    def start_sum(self, tensor: Any) -> Any:
        self.summed.append(tensor.tolist())
        return lambda: tensor


def part(**parameters: float) -> nn.Module:
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(torch.tensor([value])))
    return model


@pytest.mark.parametrize(("rank", "counted"), [(0, ["table", "first", "norm", "matrix"]), (1, ["first", "matrix"])])
def test_a_parameter_that_two_ranks_hold_counts_on_the_first(rank: int, counted: list[str]) -> None:
    group = TensorParallelGroup(Ranks(rank), frozenset({"norm"}), frozenset())
    partition = ModelPartition(
        part(), NAMES, Ranks(rank), shared=["table"], ends=Ranks(rank), device=CPU, tensor_group=group
    )
    assert [name for name in ("table", "first", "norm", "matrix") if partition.counts(name)] == counted


def test_shared_and_partial_gradients_are_summed_in_one_order_and_message_and_no_others() -> None:
    ends, tensor = Ranks(0), Ranks(0)
    group = TensorParallelGroup(tensor, frozenset("pqr"), frozenset("qp"))
    partition = ModelPartition(part(), NAMES, Ranks(0), shared=["t", "s"], ends=ends, device=CPU, tensor_group=group)
    partition.reduce_shared({name: torch.tensor(float(ord(name))) for name in "tsrqp"})
    assert (ends.summed, tensor.summed) == ([[ord("s"), ord("t")]], [[ord("p"), ord("q")]])


def test_a_shared_parameter_that_one_rank_holds_is_not_shared() -> None:
    partition = ModelPartition(part(), NAMES, LocalGroup(), shared=["table"], ends=LocalGroup(), device=CPU)
    assert partition.counts("table")
    assert not partition.is_divided


def gathered(groups_differ: bool) -> Any:
    """Return the whole model, the gathered state and this rank's part of a saved state, on each of two ranks."""
    with in_group():
        rank = dist.get_rank()
        axis = RankGroup(dist.group.WORLD)
        own = {"table": -0.0, "first": 2.0} if rank == 0 else {"second": float("nan"), "head": 4.0}
        partition = ModelPartition(part(**own), NAMES, axis, ends=LocalGroup(), device=CPU)
        whole = dict(partition.whole({name: torch.tensor([value]) for name, value in own.items()}, wanted=rank == 1))
        tensors = {
            f"{kind}{name}": torch.tensor([value]) for name, value in own.items() for kind in ("model.", "optimizer.m.")
        }
        values = {
            "optimizer": {name: {"step": rank} for name in own},
            "groups": [{"lr_scale": float(rank) if groups_differ else 1.0}],
            "tied": {f"{rank}": "x"},
        }
        try:
            state = partition.gather_state(TrainingState(tensors, values))
        except RunFailed as error:
            return str(error)
        empty = sorted(name for name, tensor in state.tensors.items() if isinstance(tensor, FlatShard))
        back = partition.own_state(state)
        return {
            "whole": {name: str(value.tolist()) for name, value in whole.items()},
            "empty": empty,
            "steps": {name: entry["step"] for name, entry in state.values["optimizer"].items()},
            "tied": state.values["tied"],
            "back": [sorted(back.tensors), sorted(back.values["optimizer"])],
        }


def test_the_whole_model_comes_bitwise_from_all_ranks_in_its_order() -> None:
    first, second = in_world(2, gathered, False)
    assert first["whole"] == {}
    assert second["whole"] == {"table": "[-0.0]", "first": "[2.0]", "second": "[nan]", "head": "[4.0]"}
    assert list(second["whole"]) == NAMES


def test_a_state_has_empty_shards_for_the_tensors_of_other_ranks() -> None:
    first, second = in_world(2, gathered, False)
    kinds = ("model.", "optimizer.m.")
    assert first["empty"] == sorted(f"{kind}{name}" for kind in kinds for name in ("second", "head"))
    assert second["empty"] == sorted(f"{kind}{name}" for kind in kinds for name in ("table", "first"))
    for state in (first, second):
        assert state["steps"] == {"table": 0, "first": 0, "second": 1, "head": 1}
        assert state["tied"] == {"0": "x", "1": "x"}


def test_a_rank_takes_its_own_part_of_a_saved_state() -> None:
    first, second = in_world(2, gathered, False)
    assert first["back"] == [
        ["model.first", "model.table", "optimizer.m.first", "optimizer.m.table"],
        ["first", "table"],
    ]
    assert second["back"][1] == ["head", "second"]


def test_groups_that_differ_between_stages_are_refused() -> None:
    for message in in_world(2, gathered, True):
        assert "that differs between the stages of" in message
