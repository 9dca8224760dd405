"""Rank <-> coordinates, for any mesh."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.config.schema import Parallel
from lockstep.core.errors import ConfigError
from lockstep.plan.mesh import AXES, Mesh, make_mesh, mesh_of
from lockstep.strategies.registry import find_strategy

meshes = st.builds(Mesh, *[st.integers(1, 4)] * 5)


@given(meshes)
def test_coordinates_and_ranks_are_one_to_one(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.ranks))
    assert len({tuple(place.values()) for place in places}) == mesh.ranks
    assert all(tuple(place) == AXES for place in places)


@given(meshes, st.sampled_from(AXES))
def test_groups_along_an_axis_hold_every_rank_once(mesh, axis):
    groups = list(mesh.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
    for group in groups:
        places = [mesh.coordinates(rank) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(len(group)))
        assert all(place == places[0] for place in places)
        assert all(mesh.group(rank, axis) == group for rank in group)


def test_tensor_neighbours_are_next_to_each_other():
    mesh = Mesh(pipeline=2, tensor=2)
    assert list(map(list, mesh.groups("tensor"))) == [[0, 1], [2, 3]]
    assert list(map(list, mesh.groups("pipeline"))) == [[0, 2], [1, 3]]


def test_thousands_of_ranks_cost_nothing():
    mesh = Mesh(pipeline=16, data=64, shard=8, context=2, tensor=8)
    assert mesh.ranks == 131_072
    assert mesh.rank(mesh.coordinates(100_001)) == 100_001
    assert len(mesh.group(100_001, "shard")) == 8


def test_data_takes_what_the_others_leave():
    assert make_mesh(8, {"tensor": 2, "pipeline": 2}) == Mesh(pipeline=2, data=2, tensor=2)
    assert make_mesh(5, {}) == Mesh(data=5)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (
            8,
            {"data": 3, "tensor": 2, "pipeline": 2},
            "data x tensor x pipeline = 3 x 2 x 2 = 12, but there are 8 ranks. data = 2 gives 8; or start 12 ranks.",
        ),
        (
            7,
            {"tensor": 2, "pipeline": 2},
            "tensor x pipeline = 2 x 2 = 4, but there are 7 ranks. "
            "Whatever data is, it takes a multiple of 4: start 4 or 8 ranks.",
        ),
        (
            4,
            {"data": 1, "pipeline": 3},
            "data x pipeline = 1 x 3 = 3, but there are 4 ranks. "
            "Whatever data is, it takes a multiple of 3: pipeline = 2 or 4 fits 4; or start 3 or 6 ranks.",
        ),
        (
            1,
            {"data": 2, "shard": 4},
            "data x shard = 2 x 4 = 8, but there is 1 rank. "
            "Whatever data is, it takes a multiple of 4: shard = 1 fits 1; or start 4 ranks.",
        ),
        (4, {"data": 3}, "data = 3, but there are 4 ranks. data = 4 gives 4; or start 3 ranks."),
    ],
)
def test_a_mesh_that_does_not_multiply_out_is_refused_with_the_nearest(ranks, sizes, message):
    with pytest.raises(ConfigError) as error:
        make_mesh(ranks, sizes)
    assert str(error.value) == f"parallel: {message}"


def _mesh_of_zero(ranks: int, stage: int, **degrees: int) -> Mesh:
    parallel = Parallel.model_validate({"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}, **degrees})
    return mesh_of(parallel, find_strategy("deepspeed"), ranks)


def test_deepspeed_divides_by_all_ranks_or_by_none() -> None:
    assert _mesh_of_zero(4, 0) == Mesh(data=4)
    for stage in (1, 2, 3):
        assert _mesh_of_zero(4, stage) == _mesh_of_zero(4, stage, shard=4) == Mesh(shard=4)
    with pytest.raises(ConfigError, match=r"zero_stage 2 has one replica; leave parallel\.data out"):
        _mesh_of_zero(4, 2, data=2)
    with pytest.raises(ConfigError, match="deepspeed with zero_stage 0 divides nothing; zero_stage 1, 2 and 3 do"):
        _mesh_of_zero(4, 0, shard=4)
    with pytest.raises(ConfigError, match=r"deepspeed with zero_stage 0 divides nothing; leave parallel\.shard out"):
        _mesh_of_zero(4, 0, shard=2)
    with pytest.raises(ConfigError, match="data x shard = 1 x 2 = 2, but there are 4 ranks"):
        _mesh_of_zero(4, 3, shard=2)


# --- advice that is followed ----------------------------------------------------------------------------------------

Asked = tuple[int, dict[str, Any]]
"""Ranks, and the section `parallel`."""


def _refusal(asked: Asked) -> str:
    ranks, section = asked
    try:
        mesh = mesh_of(Parallel.model_validate(section), find_strategy(section["strategy"]), ranks)
    except ConfigError as error:
        return str(error)
    assert mesh.ranks == ranks
    return ""


def _advised(asked: Asked, said: str) -> Iterator[Asked]:
    """What was asked, with each number or word that a refusal advises."""
    ranks, section = asked
    for starts in re.findall(r"tart ([\d or]+) ranks?", said):
        yield from ((int(number), section) for number in starts.split(" or "))
    for axis, degrees in re.findall(r"(\w+) = ([\d or]+) (?:gives|fits)", said):
        yield from ((ranks, {**section, axis: int(degree)}) for degree in degrees.split(" or "))
    for sharding in re.findall(r"(_?[A-Z]+_[A-Z_]+\d?)(?:, which has| does| has \d)", said):
        yield ranks, {**section, "strategy": "fsdp", "fsdp": {"sharding_strategy": sharding}}


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
def test_what_a_refusal_of_degrees_advises_is_taken(asked: Asked) -> None:
    said = _refusal(asked)
    advised = list(_advised(asked, said))
    assert advised or "but there" not in said
    for one in advised:
        assert _refusal(one) == "", (said, one)
