"""Muon and Adafactor on ranks that hold rows of each parameter update as one that holds everything."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.small import in_group
from kit.worlds import in_world
from optim.test_optimizers import OPTIMS, Watched
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lockstep.distributed.collectives import RankGroup
from lockstep.distributed.shard_boxes import RowShards
from lockstep.optim import fused, stepping, whole_matrices
from lockstep.optim.groups import parameter_groups
from lockstep.optim.optimizers import build_optimizer

SHAPES = {
    "wide.weight": (6, 40),
    "tall.weight": (23, 4),
    "uneven.weight": (7, 9),
    "as_many_rows_as_ranks.weight": (3, 5),
    "fewer_rows_than_ranks.weight": (2, 5),
    "row.weight": (1, 5),
    "column.weight": (5, 1),
    "embedding.weight": (11, 4),
    "experts.weight": (4, 3, 5),
    "bias": (8,),
}
UNUSED = "uneven.weight"
STEPS = 6


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    parts = whole.chunk(ranks)
    return parts[rank].clone() if rank < len(parts) else whole[:0].clone()


def updates(name: str, rank: int, ranks: int, *, gates: bool) -> dict[str, Any]:
    """Weights and state after some updates, of which one is discarded, and one leaves a parameter out."""
    parameters = {key: nn.Parameter(rows(value, rank, ranks)) for key, value in values(0).items()}
    shards = RowShards(RankGroup(dist.group.WORLD), SHAPES) if ranks > 1 else None  # type: ignore[arg-type]
    optimizer = build_optimizer(OPTIMS[name], parameter_groups(parameters.items(), OPTIMS[name]), shards)
    for step in range(STEPS):
        for key, gradient in values(step + 1).items():
            parameters[key].grad = None if (key, step) == (UNUSED, 1) else rows(gradient, rank, ranks)
        if step == 3:
            parameters["bias"].grad = torch.full_like(parameters["bias"], torch.nan)
        keep = torch.tensor(step != 3)
        with pytest.MonkeyPatch.context() as patch:
            if gates:
                for module in (fused, stepping):
                    patch.setattr(module, "decided", lambda keep: keep)
            optimizer.update(0.05, torch.tensor(2.0), keep)
        assert all(parameter.grad is None for parameter in parameters.values())
    state: Any = optimizer.state_dict()["parameters"]
    return {"weights": {key: value.detach() for key, value in parameters.items()}, "state": state}


def on_ranks(names: list[str]) -> list[dict[str, Any]]:
    with in_group():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole_matrices.CHUNK_BYTES = 2 * 300  # several rounds, of several matrices
        made = []
        for name in names:
            both = [updates(name, rank, ranks, gates=gates) for gates in (False, True)]
            torch.testing.assert_close(both[1], both[0], rtol=1e-6, atol=1e-7)
            made.append(tree_map(lambda value: value.numpy(), both[0]))
        return made


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_rows_update_as_one_with_all(ranks: int) -> None:
    names = ["muon", "adafactor"]
    results = in_world(ranks, on_ranks, names)
    for number, name in enumerate(names):
        expected = updates(name, 0, 1, gates=False)
        close = {"rtol": 1e-5, "atol": 1e-6}
        for rank, result in enumerate(results):
            own = {key: rows(value, rank, ranks) for key, value in expected["weights"].items()}
            made = tree_map(torch.from_numpy, result[number])
            torch.testing.assert_close(made["weights"], own, **close)
            for key, entries in expected["state"].items():
                for entry, value in entries.items():
                    is_whole = value.ndim == 0 or (entry == "col_var" and len(SHAPES[key]) == 2)
                    same = value if is_whole else rows(value, rank, ranks)
                    part = made["state"][key][entry]
                    torch.testing.assert_close(part, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_each_matrix_is_computed_once_and_ranks_have_even_work(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_matrices, "CHUNK_BYTES", 2 * 64 * 64 * 3)
    shapes = [(64, 64), (64, 128), (32, 32), (128, 64)] * 14
    rounds = whole_matrices.rounds(shapes, ranks, 2)
    assert sorted(index for members in rounds for of_rank in members for index in of_rank) == list(range(len(shapes)))
    for members in rounds:
        for of_rank in members:
            assert sum(prod(shapes[index]) * 2 for index in of_rank) <= max(whole_matrices.CHUNK_BYTES, 2 * 64 * 128)
    work = [
        sum(prod(shapes[index]) * min(shapes[index]) for members in rounds for index in members[rank])
        for rank in range(ranks)
    ]
    assert max(work) <= min(work) + 128 * 64 * 64


def peak_of(sizes: tuple[int, int]) -> tuple[int, int]:
    """Bytes that an update allocates at most, and those of one matrix."""
    with in_group():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole_matrices.CHUNK_BYTES = 1
        shapes = {f"{index}.weight": sizes for index in range(12)}
        parameters = {name: nn.Parameter(rows(torch.randn(sizes), rank, ranks)) for name in shapes}
        shards = RowShards(RankGroup(dist.group.WORLD), shapes)  # type: ignore[arg-type]
        groups = parameter_groups(parameters.items(), OPTIMS["muon"])
        optimizer = build_optimizer(OPTIMS["muon"], groups, shards, torch.bfloat16)
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        with Watched() as watched:
            optimizer.update(0.1, 1.0, True)
        return watched.peak, prod(sizes) * 4


def test_few_matrices_are_gathered_at_a_time() -> None:
    """In bf16, half a matrix each: two that are sent, two that come, and four of the iteration."""
    for peak, matrix in in_world(2, peak_of, (96, 96)):
        assert matrix < peak <= 5 * matrix
