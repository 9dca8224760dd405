"""Launchers of several hosts wait for one that is lost: on loopback, where each is a host with a rank of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from kit.failures import gives
from kit.waiting import wait_for, wait_until
from kit.worlds import free_port

from lockstep.launch import agent
from lockstep.launch.agent import ProxyProcess

if TYPE_CHECKING:
    from conftest import ForkServer, Launched

HOST = socket.gethostname()


class Hosts:
    """Launchers whose ranks sleep in the first round, until something happens, and end at once in the next."""

    def __init__(self, fork_server: ForkServer, folder: Path, nodes: int | str, wait: float) -> None:
        self._server, self._folder, self._wait = fork_server, folder, wait
        self.address = f"127.0.0.1:{free_port()}"
        self._section = {"nodes": nodes, "rendezvous": self.address, "job_id": "tested", "timeout": 20.0}

    def start(self, node: int | None, first: str = "sleep:60", **section: object) -> Launched:
        return self.start_rounds(node, [[f"pid:{self._folder},{first}"] * 3, ["reduce:2"] * 3], **section)

    def start_rounds(
        self, node: int | None, scripts: list[list[str]], *, fails: bool = False, **section: object
    ) -> Launched:
        """Start one whose rank N performs scripts[R - 1][N] in round R."""
        section = {**self._section, "node_rank": node, **section}
        return self._server.start(
            "host_rounds", scripts=scripts, ranks=1, section=section, wait=self._wait, fails=fails
        )

    def both(self) -> list[Launched]:
        return self.all(2)

    def all(self, number: int) -> list[Launched]:
        launched = [self.start(node) for node in range(number)]
        wait_for([self._folder / f"pid-{rank}" for rank in range(number)])
        return launched


def prints(launched: Launched, text: str) -> bool:
    return launched.err_path.exists() and text in launched.err


def killed(launched: Launched) -> None:
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait()


def test_a_host_that_does_not_return_ends_the_run(fork_server: ForkServer, tmp_path: Path) -> None:
    hosts = Hosts(fork_server, tmp_path, 3, wait=1.0)
    first, second, third = hosts.all(3)
    killed(third)
    assert [first.wait(), second.wait()] == [1, 1]
    for each in (first, second):
        assert each.err.splitlines()[-2:] == [
            f"lockstep: host {HOST} (rank 2) is lost: its connection was closed",
            f"2 of 3 hosts reached {hosts.address} within 1 s (recovery.host_wait): {HOST}, {HOST}; missing: node rank "
            f"2. Start the same command on each host, and let the hosts reach {hosts.address}",
        ]


def test_a_host_that_cannot_start_its_ranks_again_states_why(fork_server: ForkServer, tmp_path: Path) -> None:
    hosts = Hosts(fork_server, tmp_path, 2, wait=1.0)
    scripts = [["sleep:60", "kill:9"], ["sleep:60"] * 2]
    first, second = [hosts.start_rounds(node, scripts, fails=node == 1) for node in range(2)]
    assert [first.wait(), second.wait()] == [1, 1]
    reason = "its ranks can't be started: [Errno 11] Resource temporarily unavailable"
    assert second.err.splitlines()[-1] == reason
    assert f"host {HOST}: {reason}" in first.err


def test_a_host_that_does_not_find_the_first_one_states_why(fork_server: ForkServer, tmp_path: Path) -> None:
    first, second = Hosts(fork_server, tmp_path, 2, wait=0.5).both()
    killed(first)
    assert second.wait() == 1
    assert gives(second.err, "0.5 s", "recovery.host_wait", "nothing listens")


@pytest.mark.parametrize(("stop", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stop_while_a_host_is_waited_for_ends_the_run(
    fork_server: ForkServer, tmp_path: Path, lost: int, stop: str, code: int
) -> None:
    launched = Hosts(fork_server, tmp_path, 2, wait=60.0).both()
    killed(launched[lost])
    other = launched[1 - lost]
    words = "this host waits up to 60 s" if lost == 0 else "start again, from the newest state"
    wait_until(lambda: prints(other, words))
    os.kill(other.pid, signal.Signals[stop])
    assert other.wait() == code
    assert other.err.endswith(f"stopped by {stop}\n")


@pytest.mark.parametrize(("stop", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stop_while_ranks_are_ended_after_a_host_was_lost_ends_the_run(
    fork_server: ForkServer, tmp_path: Path, lost: int, stop: str, code: int
) -> None:
    hosts = Hosts(fork_server, tmp_path, 2, wait=60.0)
    launched = [hosts.start(node, first="deaf,sleep:60") for node in range(2)]
    wait_for([tmp_path / f"pid-{rank}" for rank in range(2)])
    killed(launched[lost])
    other = launched[1 - lost]
    wait_until(lambda: prints(other, "its ranks are ended"))
    os.kill(other.pid, signal.Signals[stop])
    assert other.wait() == code, other.err
    assert f"stopped by {stop}" in other.err


@pytest.mark.parametrize("stopped", [0, 1])
def test_hosts_end_when_one_is_stopped_while_they_wait(fork_server: ForkServer, tmp_path: Path, stopped: int) -> None:
    launched = Hosts(fork_server, tmp_path, 3, wait=60.0).all(3)
    killed(launched.pop())
    wait_until(lambda: prints(launched[1], "all ranks start again"))
    os.kill(launched[stopped].pid, signal.SIGTERM)
    assert [each.wait() for each in launched] == [75, 75]
    for each in launched:
        where = f" on host {HOST}" * (each is not launched[stopped] and stopped == 1)
        assert each.err.splitlines()[-1].removeprefix("lockstep: ") == f"stopped by SIGTERM{where}"


def test_a_host_that_comes_while_all_are_there_takes_the_place_of_a_lost_one(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    hosts = Hosts(fork_server, tmp_path, 2, wait=20.0)
    first, second = hosts.both()
    third = hosts.start(None)
    wait_until(lambda: prints(third, "2 hosts train already; this one waits"))
    killed(second)
    assert [first.wait(), third.wait()] == [0, 0], first.err + third.err
    assert gives(first.err, "round 2", "2 hosts")


def test_a_host_that_waits_in_vain_ends_with_the_run(fork_server: ForkServer, tmp_path: Path) -> None:
    hosts = Hosts(fork_server, tmp_path, 2, wait=20.0)
    first, second = hosts.both()
    third = hosts.start(None)
    wait_until(lambda: prints(third, "2 hosts train already; this one waits"))
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    assert [first.wait(), second.wait(), third.wait()] == [0, 0, 0], first.err + second.err + third.err


def test_a_run_that_may_have_fewer_hosts_waits_for_none(fork_server: ForkServer, tmp_path: Path) -> None:
    hosts = Hosts(fork_server, tmp_path, "1:2", wait=20.0)
    first, second = hosts.both()
    killed(second)
    assert first.wait() == 0, first.err
    assert gives(first.err, "round 2", "1 host")


@pytest.mark.parametrize("nodes", ["2:3", 3])
def test_a_host_that_cannot_start_its_ranks_costs_the_others_no_round(
    fork_server: ForkServer, tmp_path: Path, nodes: int | str
) -> None:
    """One that comes later, or instead of one that is lost; the run then waits for yet another."""
    hosts = Hosts(fork_server, tmp_path, nodes, wait=20.0)
    rounds = [[f"pid:{tmp_path},sleep:60"] * 3, ["sleep:60"] * 3, ["reduce:2"] * 3]
    launched = [hosts.start_rounds(node, rounds, nodes_wait=0.5) for node in range(2 if nodes == "2:3" else 3)]
    wait_for([tmp_path / f"pid-{rank}" for rank in range(len(launched))])
    if nodes == 3:
        killed(launched.pop())
    refused = hosts.start_rounds(2, rounds, interface="nope0")
    assert refused.wait() == 2
    reason = "launch.interface: this host has no interface nope0"
    assert reason in refused.err
    if nodes == 3:
        wait_until(lambda: prints(launched[0], reason))
        launched.append(hosts.start_rounds(2, rounds))
    assert [each.wait() for each in launched] == [0] * len(launched), launched[0].err + launched[1].err
    for each in launched[:2]:
        assert f"lockstep: host {HOST}: {reason}" in each.err
        assert gives(each.err, "round 3", f"{len(launched)} hosts")


class ScriptedProxy:
    """A proxy that has received these messages."""

    def __init__(self, messages: list[dict[str, object]]) -> None:
        self.channel, self._writer = multiprocessing.Pipe(duplex=False)
        self.has_ended = False
        for message in messages:
            self._writer.send(message)

    def receive(self) -> object:
        return self.channel.recv()


def test_a_host_that_is_lost_before_the_folder_is_known_is_left_to_the_leader() -> None:
    hosts = [{"host": name, "ranks": 1} for name in "abc"]
    proxy = ScriptedProxy(
        [
            {"type": "world", "round": 1, "hosts": hosts, "node": 1, "address": "10.0.0.2"},
            {"type": "lost", "round": 1, "node": 2, "why": "its connection was closed"},
            {"type": "folder", "round": 1, "path": "/runs/a", "decision": {}},
        ]
    )
    follower = agent.Hosts(cast(ProxyProcess, proxy), "b", leads=False, recovers=True)
    follower.round = 1
    follower.meet()
    assert follower.wait_for_folder() == Path("/runs/a")
    assert gives(follower.ends[2].text, "host c", "rank 2", "lost")


@pytest.mark.parametrize("act", ["orderly", "sleep"])
def test_a_host_that_comes_is_taken_in_at_once(fork_server: ForkServer, tmp_path: Path, act: str) -> None:
    """Also while ranks begin, which a signal then ends without a save."""
    hosts = Hosts(fork_server, tmp_path, "1:2", wait=20.0)
    first = hosts.start(0, {"orderly": f"orderly:{tmp_path}", "sleep": "sleep:60"}[act], nodes_wait=0.0)
    wait_for([tmp_path / "pid-0"])
    second = hosts.start(1)
    assert [first.wait(), second.wait()] == [0, 0], first.err + second.err
    assert "has come: all ranks save, and start again with it" in first.err
    assert gives(first.err, "round 2", "2 hosts")
