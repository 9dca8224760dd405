from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import ConfigError
from lockstep.core.ranks import RankEnvironment, names_a_rank

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@st.composite
def environments(draw: st.DrawFn) -> RankEnvironment:
    world = draw(st.integers(1, 64))
    local = draw(st.integers(1, world))
    rank = draw(st.integers(0, world - 1))
    descriptor = draw(st.none() | st.integers(3, 99)) if rank == 0 else None
    return RankEnvironment(rank, world, draw(st.integers(0, local - 1)), local, "node0", 29500, descriptor)


@given(environments())
def test_written_variables_read_back(environment: RankEnvironment) -> None:
    assert RankEnvironment.read(environment.variables()) == environment


def test_without_a_launcher_there_is_one_rank() -> None:
    assert RankEnvironment.read({"MASTER_ADDR": "left over", "PATH": "/bin"}) == RankEnvironment(0, 1, 0, 1)
    assert not names_a_rank({"MASTER_ADDR": "left over"})


@pytest.mark.parametrize("local", [{"LOCAL_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2"}, {}])
def test_the_local_world_size_of_other_launchers(local: dict[str, str]) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"} | local
    assert RankEnvironment.read(environ).local_world_size == (2 if local else 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK: is not set, but WORLD_SIZE=4, LOCAL_RANK=1, MASTER_ADDR=node0, MASTER_PORT=29500 is"),
        ({"RANK": "4"}, "RANK: is 4, but with WORLD_SIZE 4 it is from 0 to 3"),
        ({"RANK": "one"}, "RANK: is 'one', which is not a whole number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: is 2, but with WORLD_SIZE 4 it is from 0 to 1"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE: is 8, but with WORLD_SIZE 4 it is from 1 to 4"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: is 99999, but with WORLD_SIZE 4 it is from 0 to 65535"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        RankEnvironment.read(environ)
    assert str(caught.value).startswith(f"environment: {message}")


def test_all_missing_variables_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RankEnvironment.read({"RANK": "0", "WORLD_SIZE": "2"})
    assert [problem.key for problem in caught.value.problems] == ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]


def test_torchruns_agent_keeps_the_store_itself() -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job-7"}
    other = RankEnvironment.read(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"})
    elastic = RankEnvironment.read(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"} | agent)
    assert (other.keeps_store, other.launch_id) == (True, "")
    assert (elastic.keeps_store, elastic.launch_id) == (False, "job-7")


def test_a_single_rank_needs_no_rendezvous_endpoint() -> None:
    assert RankEnvironment.read({"RANK": "0", "WORLD_SIZE": "1"}) == RankEnvironment()


@pytest.mark.parametrize(
    ("variables", "known"),
    [
        ({"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "node0", "LOCAL_SIZE": "2"}, True),
        ({"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ({"MASTER_ADDR": "node0"}, False),  # plain srun doesn't set it
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
    ],
)
def test_ranks_are_on_one_machine_only_if_that_is_known(variables: dict[str, str], known: bool) -> None:
    common = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    assert RankEnvironment.read({**common, **variables}).one_machine is known
