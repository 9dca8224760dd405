"""Ranks wait for one another as long as launch.timeout allows; the error is one sentence."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kit.waiting import wait_for
from kit.worlds import free_port, in_world

from lockstep.config.schema import Launch
from lockstep.core.errors import CollectiveTimeout, RunFailed
from lockstep.distributed.process_group import collective_timeout, joined

_MESSAGE = "another rank did not answer within 1 s (launch.timeout), while rank 0 waited in a collective. "


def _sum(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def _two_sums_at_once(group: dist.ProcessGroup) -> None:
    """Wait for the second sum alone."""
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(2)]
    time.sleep(1.3)
    works[1].wait()


def _another_group(group: dist.ProcessGroup) -> None:
    """Make a group, whose ranks meet in the store."""
    dist.new_group([0, 1])


_WAITS = {"a sum": _sum, "two sums at once": _two_sums_at_once, "making a group": _another_group}


def _left_alone(wait: str, own_group: bool, over: Path) -> tuple[str, float]:
    """Return the error on rank 0, which waits for rank 1, and after how many seconds it came; `over` then exists."""
    began = time.monotonic()
    try:
        with joined(Launch(timeout=1.0), grouped=True) as world:
            group = dist.new_group([0, 1]) if own_group else dist.group.WORLD
            assert group is not None
            _sum(group)
            began = time.monotonic()
            if world.rank == 1:
                wait_for([over])
            else:
                try:
                    _WAITS[wait](group)
                finally:
                    over.touch()
    except CollectiveTimeout as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


_CASES = {**{wait: (wait, False) for wait in _WAITS}, "a group made later": ("a sum", True)}


def _in_a_pair(ports: list[int], folder: Path) -> tuple[str, float]:
    """Each pair of ranks is a world of its own, and has a case: they wait at the same time."""
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": ports[pair]}
    os.environ.update({name: str(value) for name, value in place.items()})
    return _left_alone(*list(_CASES.values())[pair], folder / f"over {pair}")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """Of the first rank of each case."""
    ports = [free_port() for _ in _CASES]
    found = in_world(2 * len(_CASES), _in_a_pair, ports, tmp_path_factory.mktemp("timeouts"))
    return dict(zip(_CASES, found[::2], strict=True))


@pytest.mark.parametrize("case", _CASES)
def test_a_timeout_is_one_sentence(ends: dict[str, tuple[str, float]], case: str) -> None:
    """Also in a group that is made later, where torch's default is half an hour."""
    message, seconds = ends[case]
    assert message.startswith(_MESSAGE), message
    assert 0.9 < seconds < 5.0


def test_other_errors_are_unchanged_and_torch_s_default_is_restored() -> None:
    before = c10d.default_pg_timeout
    for error in (RuntimeError("boom"), RunFailed("no disk"), ValueError("Timed out waiting 9ms for recv operation")):
        with pytest.raises(type(error)) as caught, collective_timeout(7.0, rank=0):
            raise error
        assert caught.value is error
    with collective_timeout(7.0, rank=0):
        assert c10d.default_pg_timeout == timedelta(seconds=7)
    assert c10d.default_pg_timeout == before


def test_an_error_that_a_timeout_caused_is_a_timeout() -> None:
    """torch's pipeline schedules wrap the exceptions of stages."""
    with pytest.raises(CollectiveTimeout, match="while rank 3 waited"), collective_timeout(7.0, rank=3):
        raise ValueError("stage 1") from RuntimeError("Application timeout caused pair closure")
