"""A tensor that is sharded in any way is written once, and read back sharded in any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.failures import fails
from kit.storing import Divided, Meeting, rank_states, saved, state_of, together

from lockstep.checkpoint import write_plan
from lockstep.checkpoint.file_layout import WriteItem
from lockstep.checkpoint.inventory import gather_inventories, inventory
from lockstep.checkpoint.reading import Reader, ReadItem
from lockstep.checkpoint.write_plan import SavePlanner, WritePlan
from lockstep.core.errors import RunFailed
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.shard_boxes import Box, local_shards


@st.composite
def divisions(draw: Any) -> tuple[tuple[int, ...], int, int, int, int]:
    """Draw a shape and two ways to shard it: the number of shards, and the dim."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    return shape, draw(st.integers(1, 4)), draw(dims), draw(st.integers(1, 4)), draw(dims)


@settings(max_examples=60, deadline=None)
@given(divisions())
def test_shards_that_some_ranks_wrote_are_read_by_others(tmp_path_factory: Any, division: Any) -> None:
    shape, writers, written_dim, readers, read_dim = division
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    storage, name, manifest = saved(
        tmp_path_factory.mktemp("boxes"), rank_states({"model.w": whole}, writers, written_dim)
    )
    for rank in range(readers):
        part = Divided(whole, readers, rank, read_dim)
        for box in local_shards(part).boxes:
            memory = torch.empty(box.sizes)
            Reader(storage, name, manifest).read([ReadItem("model.w", box, memory)])
            assert torch.equal(memory, part.to_local())


def _planned(states: Sequence[Mapping[str, Any]]) -> list[list[WriteItem]]:
    """Return what each rank writes."""
    meeting = Meeting(len(states))
    items: dict[int, list[WriteItem]] = {}

    def rank(number: int) -> None:
        held = gather_inventories(inventory(states[number]), meeting.axis(number))
        items[number] = WritePlan(held).items(number, states[number])

    together(len(states), rank)
    return [items[number] for number in range(len(states))]


@pytest.mark.parametrize(("min_share", "shares"), [(1, [4, 4, 4]), (2**24, [12, 0, 0])])
def test_replicated_tensors_are_written_once_in_shares_of_equal_size(
    monkeypatch: pytest.MonkeyPatch, min_share: int, shares: list[int]
) -> None:
    monkeypatch.setattr(write_plan, "MIN_SHARE_BYTES", min_share)
    holding = {f"model.{index}": torch.zeros(100) for index in range(12)}
    planned = _planned([holding] * 3)
    assert [len(share) for share in planned] == shares
    assert [item.name for share in planned for item in share] == list(holding)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Box((0, 0), (2, 2)), Box((3, 0), (1, 2))),  # a gap
        (Box((0, 0), (2, 2)), Box((1, 0), (3, 2))),  # an overlap
        (Box((0, 0), (3, 2)), Box((2, 0), (1, 2))),  # both, of the right size
        (Box((0, 0), (2, 2)), Box((2, 1), (2, 2))),  # outside
    ],
)
def test_parts_that_do_not_make_up_the_whole_are_refused(first: Box, second: Box) -> None:
    with fails(RunFailed, "w:", "whole", "[4, 2]"):
        _planned([{"w": Held(first, 4, 2)}, {"w": Held(second, 4, 2)}])


def test_ranks_that_hold_other_tensors_under_one_name_are_refused() -> None:
    with fails(RunFailed, "w", "float32 [2, 4]", "float32 [4, 2]"):
        _planned([{"w": torch.zeros(4, 2)}, {"w": torch.zeros(2, 4)}])


class Held:
    """A box of a tensor of this shape, of no known kind of sharding."""

    dtype = torch.float32

    def __init__(self, box: Box, *shape: int) -> None:
        self.shape = shape
        self._box = box

    def __create_chunk_list__(self) -> list[Any]:
        return [self._box]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.zeros(0),
        torch.zeros(3, 0),
        torch.arange(6).view(2, 3).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(7, dtype=torch.uint8),
    ],
)
def test_tensors_of_any_kind_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    storage, name, manifest = saved(tmp_path, [state_of({"model.w": tensor, "model.other": torch.ones(3)})])
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    reader = Reader(storage, name, manifest)
    reader.read([ReadItem("model.w", local_shards(tensor).kind.whole, memory)])
    reader.verify()
    assert torch.equal(memory, tensor)


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {"model.w": torch.randn(5, 3), "model.count": torch.tensor(7), "optimizer.x.w": torch.randn(5, 3).half()}
    storage, name, _ = saved(tmp_path, [state_of(tensors)])
    loaded = load_file(Path(storage.place) / name / "rank-00000.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)


def test_a_tensor_that_was_resized_since_the_save_before_is_planned_again() -> None:
    planner, buffer = SavePlanner(LocalGroup()), torch.zeros(4)
    sizes = []
    for size in (4, 6):
        layout = planner.layout({"model.seen": buffer.resize_(size)})
        sizes += [item.box.sizes for item in layout.items]
    assert sizes == [(4,), (6,)]
