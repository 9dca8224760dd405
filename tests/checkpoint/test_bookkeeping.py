"""The bookkeeping of a checkpoint is arithmetic: it grows with tensors and with ranks, not with their product."""

from __future__ import annotations

import gc
import json
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.storing import Divided, Meeting, rank_states, save, saved, state_of, together
from kit.worlds import in_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint import write_plan
from lockstep.checkpoint.file_layout import WriteItem, file_layout
from lockstep.checkpoint.inventory import (
    WHOLE,
    Inventories,
    Inventory,
    InventoryTable,
    MeshSharding,
    gather_inventories,
    inventory,
)
from lockstep.checkpoint.loading import LoadedCheckpoint, load_newest
from lockstep.checkpoint.local import LocalFile, LocalStorage
from lockstep.checkpoint.reading import Reader
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.checkpoint.shard_grid import Grid
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.write_plan import WritePlan
from lockstep.core.process_settings import paused_collection
from lockstep.core.records import TrainingState
from lockstep.distributed.collectives import group_or_all
from lockstep.distributed.shard_boxes import Box, FlatShard, local_shards, local_tensor

# --- grids --------------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """Draw a shape, a mesh and the placements of its axes; tensor parallelism beside FSDP shards in strides."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    if len(sizes) == 2 and draw(st.booleans()):
        dim = draw(dims)
        return shape, sizes, (_StridedShard(dim, split_factor=sizes[1]), Shard(dim))
    return shape, sizes, tuple(Shard(draw(dims)) if draw(st.booleans()) else Replicate() for _ in sizes)


@settings(max_examples=150, deadline=None)
@given(meshes())
def test_the_shards_of_a_mesh_are_those_of_torch(mesh: Any) -> None:
    shape, sizes, placements = mesh
    ranks = list(range(torch.Size(sizes).numel()))
    dims = tuple(None if isinstance(placement, Replicate) else placement.dim for placement in placements)
    strides = tuple(getattr(placement, "split_factor", 1) for placement in placements)
    table = InventoryTable((("w", "float32", shape, 0),), (MeshSharding(0, sizes, dims, strides),))
    plan = WritePlan(Inventories([table], [ranks], [(tuple(ranks),)] * len(ranks), [{}] * len(ranks)))
    index_of, grids = plan.grids()
    grid = grids[index_of["w"]]
    assert grid.fits(shape, len(ranks))
    for rank, coordinate in enumerate(product(*map(range, sizes))):
        local, offsets = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
        is_first = all(index == 0 for index, dim in zip(coordinate, dims, strict=True) if dim is None)
        expected = (Box(tuple(offsets), tuple(local)),) if is_first and 0 not in local else ()
        assert grid.boxes_of(rank, shape) == expected


@settings(max_examples=100, deadline=None)
@given(meshes(), st.data())
def test_a_box_is_read_from_the_cells_that_meet_it(mesh: Any, data: Any) -> None:
    shape, sizes, _ = mesh
    length = torch.Size(shape).numel()
    starts = (0, *sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=5)))) if length > 1 else (0,)
    flat = Grid(((-1, starts),), tuple(range(len(starts))))
    cuts = tuple((dim, tuple(range(0, shape[dim], sizes[0]))) for dim in range(len(shape)))
    cells = Grid(cuts, tuple(range(torch.Size([len(at) for _, at in cuts]).numel())))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    wanted = Box(offsets, tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)))
    for grid in (flat, cells):
        assert grid.fits(shape, len(grid.ranks))
        expected = {
            (rank, box) for rank in grid.ranks for box in grid.boxes_of(rank, shape) if box.meets(wanted) is not None
        }
        assert set(grid.meeting(wanted, shape)) == expected


# --- what grows with what -----------------------------------------------------------------------------------------


class Alike:
    """An axis of ranks that hold the same tensors: each answers what this one does."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.sent: list[int] = []

    def gather(self, value: object) -> list[object]:
        self.sent.append(len(pickle.dumps(value)))
        return [value] * self.size


def _sharded(tensors: int, ranks: int, rank: int) -> dict[str, Any]:
    return {
        f"model.layers.{i}.weight": FlatShard(torch.zeros(4), 4 * rank, (ranks, 4), length=4) for i in range(tensors)
    }


@pytest.mark.parametrize("tensors", [10, 2000])
def test_a_rank_sends_the_same_few_bytes_whatever_it_holds(tensors: int) -> None:
    axis = Alike(1024, 5)
    held = gather_inventories(inventory(_sharded(tensors, 1024, 5)), axis)  # type: ignore[arg-type]
    items = WritePlan(held).items(5, _sharded(tensors, 1024, 5))
    assert [item.box for item in items] == [Box((5, 0), (1, 4))] * tensors
    assert len(axis.sent) == 1
    assert axis.sent[0] < 200


def test_a_manifest_grows_with_tensors_and_with_ranks_and_not_with_both(tmp_path: Path) -> None:
    sizes = {}
    for ranks, tensors in product((2, 64), (10, 100)):
        held = gather_inventories(inventory(_sharded(tensors, ranks, 0)), Alike(ranks, 0))  # type: ignore[arg-type]
        index_of, grids = WritePlan(held).grids()
        sizes[ranks, tensors] = len(json.dumps([index_of, [(grid.cuts, grid.ranks) for grid in grids]]))
    assert sizes[64, 100] - sizes[64, 10] == sizes[2, 100] - sizes[2, 10]


def test_what_stages_hold_in_common_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two ranks each share `tied`, and each has a layer of its own; each rank has a generator."""
    monkeypatch.setattr(write_plan, "MIN_SHARE_BYTES", 1)

    def tensors(rank: int) -> dict[str, Any]:
        stage = rank // 2
        own = {f"model.{stage}.{name}": torch.zeros(2) for name in "ab"}
        empty = {f"model.{1 - stage}.{name}": FlatShard(torch.empty(0), 0, (2,)) for name in "ab"}
        return {**own, **empty, "model.tied": torch.zeros(3), f"generators.{rank}.x": torch.zeros(1)}

    meeting, items = Meeting(4), dict[int, list[WriteItem]]()

    def act(rank: int) -> None:
        held = gather_inventories(inventory(tensors(rank)), meeting.axis(rank))
        items[rank] = WritePlan(held).items(rank, tensors(rank))

    together(4, act)
    names = {rank: {item.name for item in items[rank]} for rank in range(4)}
    assert names == {
        0: {"model.0.a", "model.tied", "generators.0.x"},
        1: {"model.0.b", "generators.1.x"},
        2: {"model.1.a", "generators.2.x"},
        3: {"model.1.b", "generators.3.x"},
    }


def test_replicas_of_a_sharded_tensor_write_shares_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two shards; and data-parallel ranks whose tensor-parallel groups are meshes of their own."""
    monkeypatch.setattr(write_plan, "MIN_SHARE_BYTES", 1)
    rows = tuple((f"model.{index}", "float32", (4, 2), 0) for index in range(4))
    hybrid = Inventory(InventoryTable(rows, (MeshSharding(0, (2, 2), (None, 0), (1, 1)),)), ((0, 1, 2, 3),))
    tensor = [
        Inventory(InventoryTable(rows, (MeshSharding(0, (2,), (0,), (1,)),)), (mesh,)) for mesh in ((0, 1), (2, 3))
    ]
    for local in ([hybrid] * 4, [tensor[0], tensor[0], tensor[1], tensor[1]]):
        held = Inventories([local[0].table], [[0, 1, 2, 3]], [of.meshes for of in local], [{}] * 4)
        index_of, grids = WritePlan(held).grids()
        written = [grids[index_of[name]].ranks for name, *_ in rows]
        assert written == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert all(index != WHOLE for *_, index in rows)


# --- a manifest that no reader accepts ----------------------------------------------------------------------------


def test_a_save_whose_manifest_would_be_too_large_fails_and_the_older_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, name, manifest = saved(tmp_path, [state_of({"model.w": torch.ones(3)})], step=4)
    size = (tmp_path / name / "manifest.json").stat().st_size
    monkeypatch.setattr(manifests, "MAX_BYTES", size)
    many = {f"model.{index}": torch.ones(3) for index in range(20)}
    [failure] = save(storage, [state_of(many)], 8)
    assert failure.endswith(f"the limit is {size:,}")
    assert storage.names() == [name]
    Reader(storage, name, manifest).verify()
    assert save(storage, [state_of({"model.w": torch.ones(3)})], 8) == []


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return spied_reads(monkeypatch)


def spied_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each read of a file with tensors."""
    reads: list[int] = []
    read, init = LocalFile.read, LocalFile.__init__

    def opened(file: LocalFile, path: Path, *others: Any) -> None:
        init(file, path, *others)
        file.is_shard = path.suffix == ".safetensors"  # type: ignore[attr-defined]

    def spied(file: LocalFile, offset: int, into: memoryview) -> None:
        if file.is_shard:  # type: ignore[attr-defined]
            reads.append(len(into))
        read(file, offset, into)

    monkeypatch.setattr(LocalFile, "__init__", opened)
    monkeypatch.setattr(LocalFile, "read", spied)
    return reads


def _load(storage: Storage, states: list[TrainingState]) -> list[LoadedCheckpoint]:
    meeting, loaded = Meeting(len(states)), {}

    def rank(number: int) -> None:
        loaded[number] = load_newest(storage, meeting.axis(number), states[number])

    together(len(states), rank)
    return [loaded[number] for number in range(len(states))]


@pytest.mark.parametrize("min_share", [1, 2**24], ids=["each a share", "one share"])
def test_four_ranks_that_hold_the_same_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: list[int], min_share: int
) -> None:
    monkeypatch.setattr(write_plan, "MIN_SHARE_BYTES", min_share)
    tensors = {f"model.{index}": torch.randn(50, 7) for index in range(9)} | {"optimizer.step.0": torch.tensor(3.0)}
    storage, _, manifest = saved(tmp_path, [state_of(tensors)] * 4)
    live = [state_of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}) for _ in range(4)]
    for loaded in _load(storage, live):
        assert loaded.state.tensors.keys() == tensors.keys()
        assert all(torch.equal(loaded.state.tensors[name], tensor) for name, tensor in tensors.items())
    files = {file: entry for file, entry in manifest.files.items() if entry.size > entry.header}
    assert sum(read_bytes) == sum(entry.size for entry in files.values())  # before: four times as many


def test_a_fault_on_the_rank_that_reads_is_known_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_plan, "MIN_SHARE_BYTES", 1)
    tensors = {f"model.{index}": torch.randn(50, 7) for index in range(4)}
    states = [state_of(tensors)] * 4
    storage = LocalStorage(tmp_path)
    assert [save(storage, states, step) for step in (4, 8)] == [[], []]
    file = tmp_path / "step-00000008" / "rank-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for loaded in _load(storage, states):
        assert loaded.manifest.step == 4
        assert loaded.broken["step-00000008"].startswith("rank-00002.safetensors: bytes ")


def test_state_that_the_optimizer_makes_later_is_read_in_shards(tmp_path: Path, read_bytes: list[int]) -> None:
    whole = {"model.w": torch.randn(8, 3), "optimizer.momentum.w": torch.randn(8, 3)}
    storage, _, manifest = saved(tmp_path, rank_states(whole, 4, 0))
    live = rank_states({"model.w": torch.zeros(8, 3)}, 4, 0)
    for rank, loaded in enumerate(_load(storage, live)):
        expected = Divided(whole["optimizer.momentum.w"], 4, rank, 0).to_local()
        assert torch.equal(loaded.state.tensors["optimizer.momentum.w"], expected)
    assert sum(read_bytes) == manifest.size


def test_a_later_save_of_the_same_tensors_describes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []
    monkeypatch.setattr(
        "lockstep.checkpoint.write_plan.inventory", lambda tensors: described.append(1) or inventory(tensors)
    )
    axis = Meeting(1).axis(0)
    saver = Saver(LocalStorage(tmp_path), axis, torch.device("cpu"), RunMetadata("run", {}, {}))
    tensors = {"model.w": torch.ones(3), "model.b": torch.ones(2)}
    for step in (1, 2, 3):
        saver.start(state_of(dict(tensors)), StepMetadata(step, 0, 0, {}))
    assert len(described) == 1
    tensors["model.b"] = torch.ones(4)
    saver.start(state_of(tensors), StepMetadata(4, 0, 0, {}))
    saver.finish()
    assert len(described) == 2
    assert [outcome.failure for outcome in saver.outcomes()] == [None] * 4


def test_a_copy_makes_no_object_for_a_tensor_that_it_copies_whole() -> None:
    """Before, it made two for each: three saves of many tensors started a collection of all garbage, for 0.3 s."""
    tensors = {f"model.{number}": torch.nn.Parameter(torch.ones(3)) for number in range(500)}
    kind = local_shards(tensors["model.0"]).kind
    snapshot = Snapshot(file_layout(0, [WriteItem(name, kind, kind.whole) for name in tensors]), torch.device("cpu"))
    gc.collect()
    with paused_collection():
        before = len(gc.get_objects())
        snapshot.begin(tensors, frozenset())
        made = len(gc.get_objects()) - before
    snapshot.complete()
    assert made < 50
    assert b"".join(snapshot.image.pieces()).endswith(torch.ones(1500).numpy().tobytes())


def _save_and_load(folder: str) -> tuple[list[bool], int]:
    """Return which tensors came back, and the bytes that this rank has read of files with tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    axis, storage = group_or_all(None), LocalStorage(Path(folder))
    torch.manual_seed(7)
    tensors: dict[str, Any] = {f"model.{index}": torch.randn(9, 5) for index in range(8)}
    for index in range(6):
        tensors[f"model.{index}"] = distribute_tensor(tensors[f"model.{index}"], mesh, (Replicate(), Shard(0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "MIN_SHARE_BYTES", 1)
        saver = Saver(storage, axis, torch.device("cpu"), RunMetadata("run", {}, {}))
        saver.start(state_of(tensors), StepMetadata(3, 0, 0, {}))
        saver.finish()
        axis.barrier()
        reads = spied_reads(patch)
        loaded = load_newest(storage, axis, state_of(tensors))
    assert loaded is not None
    same = [torch.equal(loaded.state.tensors[name], local_tensor(tensor)) for name, tensor in tensors.items()]
    return same, sum(reads)


def test_replicas_of_shards_are_read_once_by_real_ranks(tmp_path: Path) -> None:
    results = in_world(4, _save_and_load, str(tmp_path))
    assert [same for same, _ in results] == [[True] * 8] * 4
    files = sum(path.stat().st_size for path in (tmp_path / "step-00000003").glob("*.safetensors"))
    assert sum(size for _, size in results) <= files  # before: every replica read its shards, and every rank the rest
