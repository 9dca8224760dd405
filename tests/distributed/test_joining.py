"""A rank whose peers end while it joins them blames them, and doesn't say that a limit is over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from kit.worlds import served

from lockstep.core.errors import PeerFailed, RunFailed
from lockstep.core.failure_kinds import Retry
from lockstep.core.ranks import RankEnvironment
from lockstep.distributed.process_group import _make_group
from lockstep.launch.ends import end_of_exception


def _rank_0(port: Connection, moment: str) -> None:
    """Keep the store, and be killed when rank 1 has asked for a round's name, or has joined that."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    server = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    store = PrefixStore("lockstep/", server)
    port.send(server.port)
    while not store.check(["ask/1"]):
        time.sleep(0.01)
    if moment == "joined":
        store.set(f"answer/{store.get('ask/1').decode()}", "a name")
    while moment == "joined" and not store.check(["joined/a name/1"]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _store(moment: str) -> Iterator[int]:
    here, there = served().Pipe()
    rank_0 = served().Process(target=_rank_0, args=(there, moment))
    rank_0.start()
    try:
        yield here.recv()
    finally:
        rank_0.kill()
        rank_0.join()


@pytest.mark.parametrize("moment", ["asked", "joined"])
def test_a_rank_0_that_is_killed_while_ranks_join_is_the_cause(moment: str) -> None:
    with (
        _store(moment) as port,
        pytest.raises(PeerFailed, match=r"could not join the other 1 ranks at .*: one of them has ended") as raised,
    ):
        _make_group(RankEnvironment(1, 2, 1, 2, "127.0.0.1", port), "gloo", torch.device("cpu"), 60)
    end = end_of_exception(raised.value, time.monotonic(), None)
    assert end.kind.retry is Retry.TRANSIENT, "the ranks start again"


def test_a_limit_that_is_over_is_no_peers_death() -> None:
    with _store("never asked") as port, pytest.raises(RunFailed, match=r"of 0\.5 s: rank 0 did not answer") as raised:
        _make_group(RankEnvironment(2, 3, 2, 3, "127.0.0.1", port), "gloo", torch.device("cpu"), 0.5)
    assert not isinstance(raised.value, PeerFailed)
