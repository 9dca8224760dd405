"""Meshes: coordinates, groups, and refusals whose advice works."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.failures import fails

from lockstep.config.schema import Parallel
from lockstep.core.errors import ConfigError
from lockstep.plan.mesh import AXES, Mesh, make_mesh, mesh_of
from lockstep.strategies.registry import find_strategy

meshes = st.builds(Mesh, *[st.integers(1, 4)] * 5)


@given(meshes)
def test_coordinates_and_ranks_are_one_to_one(mesh):
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    assert [tuple(each.values()) for each in coordinates] == list(itertools.product(*map(range, mesh.sizes)))
    assert all(tuple(each) == AXES for each in coordinates)


@given(meshes, st.sampled_from(AXES))
def test_groups_along_an_axis_hold_every_rank_once(mesh, axis):
    groups = list(mesh.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
    for group in groups:
        coordinates = [mesh.coordinates(rank) for rank in group]
        assert [each.pop(axis) for each in coordinates] == list(range(len(group)))
        assert all(each == coordinates[0] for each in coordinates)


def test_tensor_neighbors_have_consecutive_ranks():
    mesh = Mesh(pipeline=2, tensor=2)
    assert list(map(list, mesh.groups("tensor"))) == [[0, 1], [2, 3]]
    assert list(map(list, mesh.groups("pipeline"))) == [[0, 2], [1, 3]]


def test_thousands_of_ranks_cost_nothing():
    mesh = Mesh(pipeline=16, data=64, shard=8, context=2, tensor=8)
    assert mesh.ranks == 131_072
    assert tuple(mesh.coordinates(100_001).values()) == (12, 13, 2, 0, 1)
    assert next(len(group) for group in mesh.groups("shard") if 100_001 in group) == 8


def test_data_follows_from_the_other_axes():
    assert make_mesh(8, {"tensor": 2, "pipeline": 2}) == Mesh(pipeline=2, data=2, tensor=2)
    assert make_mesh(5, {}) == Mesh(data=5)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (
            8,
            {"data": 3, "tensor": 2, "pipeline": 2},
            "data x tensor x pipeline = 3 x 2 x 2 = 12, not 8, the number of ranks. data = 2 gives 8; "
            "or start 12 ranks.",
        ),
        (
            7,
            {"tensor": 2, "pipeline": 2},
            "tensor x pipeline = 2 x 2 = 4, not 7, the number of ranks. Start 4 or 8 ranks.",
        ),
        (
            4,
            {"data": 1, "pipeline": 3},
            "data x pipeline = 1 x 3 = 3, not 4, the number of ranks. Start 3 or 6 ranks.",
        ),
        (
            1,
            {"data": 2, "shard": 4},
            "data x shard = 2 x 4 = 8, not 1, the number of ranks. Start 4 ranks.",
        ),
        (4, {"data": 3}, "data = 3, not 4, the number of ranks. data = 4 gives 4; or start 3 ranks."),
    ],
)
def test_a_mesh_that_does_not_multiply_out_is_refused_with_the_nearest(ranks, sizes, message):
    with pytest.raises(ConfigError) as error:
        make_mesh(ranks, sizes)
    assert str(error.value) == f"parallel: {message}"


def _mesh_of_zero(ranks: int, stage: int, **degrees: int) -> Mesh:
    parallel = Parallel.model_validate({"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}, **degrees})
    return mesh_of(parallel, find_strategy("deepspeed"), ranks)


def test_deepspeed_shards_over_all_ranks_or_none() -> None:
    assert _mesh_of_zero(4, 0) == Mesh(data=4)
    for stage in (1, 2, 3):
        assert _mesh_of_zero(4, stage) == _mesh_of_zero(4, stage, shard=4) == Mesh(shard=4)
    with fails(ConfigError, "zero_stage 2", key="parallel.data"):
        _mesh_of_zero(4, 2, data=2)
    with fails(ConfigError, "zero_stage 0", key="parallel.shard"):
        _mesh_of_zero(4, 0, shard=2)
    with fails(ConfigError, "data x shard = 1 x 2 = 2", 4, key="parallel"):
        _mesh_of_zero(4, 3, shard=2)


# --- the advice of refusals ---------------------------------------------------------------------------------------

Degrees = tuple[int, dict[str, Any]]
"""Ranks, and the section `parallel`."""


def _refusal(degrees: Degrees) -> str:
    ranks, section = degrees
    try:
        mesh = mesh_of(Parallel.model_validate(section), find_strategy(section["strategy"]), ranks)
    except ConfigError as error:
        return str(error)
    assert mesh.ranks == ranks
    return ""


def _advised(degrees: Degrees, refusal: str) -> Iterator[Degrees]:
    """Yield the degrees with each number or word that a refusal advises."""
    ranks, section = degrees
    for starts in re.findall(r"tart ([\d or]+) ranks?", refusal):
        yield from ((int(number), section) for number in starts.split(" or "))
    for axis, sizes in re.findall(r"(\w+) = ([\d or]+) (?:gives)", refusal):
        yield from ((ranks, {**section, axis: int(size)}) for size in sizes.split(" or "))


_degrees = st.fixed_dictionaries(
    {"strategy": st.sampled_from(["ddp", "fsdp", "deepspeed"])},
    optional={
        "data": st.integers(1, 4),
        "shard": st.integers(1, 4),
        "fsdp": st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]).map(
            lambda word: {"sharding_strategy": word}
        ),
        "deepspeed": st.integers(0, 3).map(lambda stage: {"zero_stage": stage}),
        "pipeline": st.sampled_from([1, 2, 3, "auto"]),
        "tensor": st.sampled_from([1, 2, 3]),
    },
)


@given(st.tuples(st.integers(1, 12), _degrees))
@example((4, {"strategy": "fsdp", "shard": 2}))
@example((9, {"strategy": "fsdp", "shard": 2, "pipeline": 2}))
@example((9, {"strategy": "fsdp", "data": 2, "fsdp": {"sharding_strategy": "HYBRID_SHARD"}}))
@settings(max_examples=500)
def test_the_advice_of_a_refusal_is_accepted(degrees: Degrees) -> None:
    refusal = _refusal(degrees)
    advised = list(_advised(degrees, refusal))
    assert advised or "but there" not in refusal
    for other in advised:
        assert _refusal(other) == "", (refusal, other)
