"""What torch's CUDA allocator reserves, replayed: rounding, pools, splitting, segments, streams, limits."""

from __future__ import annotations

import itertools
import random

import pytest
from simulation.test_step_time import cluster, large

from lockstep.assembly.user_objects import UserObjects
from lockstep.plan.gpus import parse_cluster
from lockstep.simulation.planning import describe_memory, estimates_of, estimator_of
from lockstep.simulation.reserved import MIB, CachingAllocator, expandable_segments, nccl_bytes, reserved_of
from lockstep.simulation.trace import Change, Sent, StepTrace

KIB = 1 << 10
WORKSPACE = 32 * MIB


@pytest.mark.parametrize(
    ("requests", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([MIB + 1] * 8, 20 * MIB),  # what is left, 12 MiB and less, is split off as long as it is more than 1 MiB
        ([10 * MIB - 512], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([512 * KIB, 11 * MIB], 2 * MIB + 12 * MIB),
    ],
)
def test_segments(requests: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size, 0) for size in requests]
    assert allocator.reserved == reserved
    for block in random.Random(0).sample(blocks, len(blocks)):
        allocator.free(block)
    again = [allocator.allocate(size, 0) for size in requests]
    assert (len(again), allocator.reserved) == (len(requests), reserved), "free blocks are joined, and used again"


def test_a_large_block_is_left_whole_for_a_remainder_of_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, 0))
    assert allocator.allocate(11 * MIB, 0).size == 12 * MIB
    grown = CachingAllocator(expandable=True)
    grown.free(grown.allocate(12 * MIB, 0))
    assert grown.allocate(11 * MIB, 0).size == 11 * MIB


def test_streams_share_no_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, 0))
    allocator.allocate(30 * MIB, 1)
    assert allocator.reserved == 60 * MIB
    allocator.allocate(30 * MIB, 0)
    assert allocator.reserved == 60 * MIB


def changes_that_fragment() -> list[Change]:
    """Return allocations of growing size, each after the one before is freed: no free block is large enough."""
    changes = []
    for number in range(10):
        changes += [Change(number, (20 + 2 * number) * MIB, 0), Change(number, 0, 0)]
    return changes


def test_a_limit_releases_segments_before_it_is_out_of_memory() -> None:
    free, tight, over = (CachingAllocator(limit) for limit in (None, WORKSPACE + 40 * MIB, WORKSPACE + 36 * MIB))
    assert [each.replay(changes_that_fragment()) for each in (free, tight, over)] == [None, True, False]
    assert free.peak == WORKSPACE + sum(20 + 2 * number for number in range(10)) * MIB
    assert (free.releases, tight.releases > 0) == (0, True)
    assert tight.peak <= WORKSPACE + 40 * MIB


def test_expandable_segments_leave_no_gaps() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.replay(changes_that_fragment())
    assert allocator.peak == 80 * MIB, "workspace and largest block, 70 MiB, in pages of 20"
    assert expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"})
    assert not expandable_segments({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_reserved_holds_what_is_used(expandable: bool) -> None:
    draw, allocator, held = random.Random(1), CachingAllocator(expandable=expandable), []
    used = 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            size, block = held.pop(draw.randrange(len(held)))
            allocator.free(block)
            used -= size
        else:
            size = int(2 ** draw.uniform(0, 26))
            held.append((size, allocator.allocate(size, draw.randrange(2))))
            used += size
        assert used <= allocator.reserved <= allocator.peak
    taken = [(block.kind, block.address, block.address + block.size) for _, block in held]
    taken.sort(key=lambda each: each[1])
    assert all(first[2] <= second[1] for first, second in itertools.pairwise(taken)), "no two overlap"


def test_each_communicator_has_buffers() -> None:
    whole, half = tuple(range(8)), tuple(range(4))
    reduce = Sent(0, "all_reduce", whole, 1, asynchronous=True)
    one, two, exchange = (
        nccl_bytes(StepTrace(entries=list(entries)), cluster())
        for entries in ([reduce, reduce], [reduce, reduce._replace(ranks=half)], [reduce._replace(name="all_to_all")])
    )
    assert (two, exchange) == (2 * one, 7 * one)
    assert one > nccl_bytes(StepTrace(entries=[reduce]), parse_cluster("L4:8")) > 0


def test_a_gpu_that_is_named_is_judged_by_what_is_reserved() -> None:
    config, gpus = large(8), cluster()
    row = next(iter(estimates_of(estimator_of(config, 8, gpus.gpu.memory, UserObjects(), gpus), None, "planned")))
    assert row.peak is not None
    reserved = row.peak.reserved
    assert reserved is not None
    assert row.peak.bytes < reserved.allocator < reserved.total < 1.5 * row.peak.bytes + (2 << 30)
    values = row.as_json()
    assert values["reserved_bytes"] == sum(values[f"{name}_bytes"] for name in ("allocator", "context", "nccl"))
    assert row.fits
    assert "reserved" in describe_memory([row], gpus.gpu.memory)

    def fits(memory: int) -> bool | None:
        estimator = estimator_of(config, 8, memory, UserObjects(), gpus)
        return next(iter(estimates_of(estimator, None, "planned"))).fits

    assert fits(reserved.total), "not nine tenths"
    assert not fits(row.peak.bytes)


def test_a_replay_without_limit_is_what_a_full_gpu_would_have_needed() -> None:
    trace = StepTrace(allocations=changes_that_fragment())
    full, empty = (reserved_of(trace, cluster(), memory) for memory in (580 * MIB, None))
    assert (full.fits, empty.fits, full.allocator) == (False, None, empty.allocator)
