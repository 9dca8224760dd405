"""A part of a tensor is drawn to the bits that torch draws for the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from lockstep.distributed.shard_boxes import FlatShard
from lockstep.models import initial_values
from lockstep.models.initial_values import ConstantRow, Normal, draws_of, put

SIZES = (16, 17, 31, 32, 33, 1000, 1003, 5000, 20011)


def _whole(elements: int, seed: int = 9) -> torch.Tensor:
    return torch.empty(elements).normal_(0.5, 2.0, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("elements", SIZES)
def test_a_slice_is_that_of_the_whole(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "_CHUNK", 64)
    whole, n = _whole(elements), elements
    bounds = [(0, n), (0, n // 2), (n // 2, n), (1, n - 1), (n - 3, n), (n // 3, 2 * n // 3), (max(0, n - 17), n - 1)]
    for start, stop in bounds:
        mine = torch.full((stop - start,), 9.0)
        Normal((n,), 0.5, 2.0, 9).fill(mine, start)
        assert torch.equal(mine, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("elements", SIZES)
def test_draws_before_a_tensor_are_skipped(elements: int) -> None:
    generator = torch.Generator().manual_seed(9)
    torch.empty(elements).normal_(generator=generator)
    second = torch.empty(1003).normal_(0.5, 2.0, generator=generator)
    mine = torch.empty(500)
    Normal((1003,), 0.5, 2.0, 9, skip=draws_of(elements)).fill(mine, 400)
    assert torch.equal(mine, second[400:900])


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
