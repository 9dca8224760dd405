"""A part of a tensor is drawn to the bits that torch draws for the whole, without the draws before it."""

from __future__ import annotations

import itertools

import pytest
import torch

from lockstep.distributed.shard_boxes import FlatShard
from lockstep.models import random_slices
from lockstep.models.initial_values import ConstantRow, Normal, put
from lockstep.models.random_slices import draws_of, jump, normal_slice

SIZES = (16, 17, 31, 32, 33, 1000, 1003, 5000, 20011)


def _whole(elements: int, seed: int = 9) -> torch.Tensor:
    return torch.empty(elements).normal_(0.5, 2.0, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("short", [700, random_slices._SHORT], ids=["jumps", "draws"])
@pytest.mark.parametrize("elements", SIZES)
def test_a_slice_is_that_of_the_whole(short: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_slices, "_SHORT", short)
    monkeypatch.setattr(random_slices, "_CHUNK", 64)
    whole, n = _whole(elements), elements
    bounds = [(0, n), (0, n // 2), (n // 2, n), (1, n - 1), (n - 3, n), (n // 3, 2 * n // 3), (max(0, n - 17), n - 1)]
    for start, stop in bounds:
        mine = torch.full((stop - start,), 9.0)
        normal_slice(mine, start, n, 0.5, 2.0, 9)
        assert torch.equal(mine, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("elements", SIZES)
def test_draws_before_a_tensor_are_skipped(elements: int) -> None:
    generator = torch.Generator().manual_seed(9)
    torch.empty(elements).normal_(generator=generator)
    second = torch.empty(1003).normal_(0.5, 2.0, generator=generator)
    mine = torch.empty(500)
    normal_slice(mine, 400, 1003, 0.5, 2.0, 9, skip=draws_of(elements))
    assert torch.equal(mine, second[400:900])


@pytest.mark.parametrize("draws", [624, 1000, 3_000_000])
@pytest.mark.parametrize("before", [0, 5, 623, 624])
def test_a_jump_is_as_many_draws(draws: int, before: int) -> None:
    jumping, drawing = (torch.Generator().manual_seed(2**63 + 1) for _ in range(2))
    for generator in (jumping, drawing):
        torch.empty(before, dtype=torch.int32).random_(generator=generator)
    jump(jumping, draws)
    torch.empty(draws, dtype=torch.int32).random_(generator=drawing)
    for _ in range(3):
        expected = torch.empty(500, dtype=torch.int32).random_(generator=drawing)
        assert torch.equal(torch.empty(500, dtype=torch.int32).random_(generator=jumping), expected)


@pytest.mark.parametrize("shape", [(7, 40), (5,), (3, 4, 33)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_draw_their_shards(shape: tuple[int, ...], ranks: int) -> None:
    value = Normal(shape, 0.0, 0.02, 11)
    whole = torch.empty(shape)
    put(whole, value)
    assert torch.equal(whole, torch.empty(shape).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(11)))
    if len(shape) == 2:
        whole[5] = 0.0
        value = ConstantRow(value, 5, 0.0)
    for dtype in (torch.float32, torch.bfloat16):
        bounds = [rank * whole.numel() // ranks for rank in range(ranks + 1)]
        flats = [FlatShard(torch.empty(b - a, dtype=dtype), a, shape) for a, b in itertools.pairwise(bounds)]
        for flat in flats:
            put(flat, value)
        assert torch.equal(torch.cat([flat.memory for flat in flats]), whole.to(dtype).view(-1))
