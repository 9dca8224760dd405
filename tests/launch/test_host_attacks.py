"""What happens to links and launchers of three hosts, and what the others make of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands import Running
from kit.hosts import Network, needs_hosts, network

pytestmark = [needs_hosts, pytest.mark.drill]
RUN = (
    "train", "digits", "run.steps=100000", "launch.device=cpu", "monitor.every=1", "run.folder=run", "--ranks", 1,
    "evaluation.at_end=false", "checkpoint.every=5", "launch.timeout=20", "--nodes", 3,
    "recovery.restarts=0",
)  # fmt: skip


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(3, tmp_path) as hosts:
        yield hosts


@pytest.fixture
def launched(net: Network, tmp_path: Path) -> list[Running]:
    """Three launchers, by host, whose ranks train; host 1 joins first."""
    words = (*RUN, "--rendezvous", f"{net.address(0)}:29500")
    started = {host: net.start(host, *words, cwd=tmp_path, LOCKSTEP_JOB_TOKEN="t") for host in (1, 0)}
    started[1].wait_for(lambda: bool(started[1].ranks))
    time.sleep(1.0)  # until they have met: nothing shows that
    started[2] = net.start(2, *words, cwd=tmp_path, LOCKSTEP_JOB_TOKEN="t")
    started[0].wait_for(lambda: _updates(tmp_path) > 5)
    return [started[host] for host in range(3)]


def _updates(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _last_lines(launched: list[Running]) -> list[str]:
    return [[line for line in each.output.splitlines() if line.startswith("lockstep: host")][-1] for each in launched]


def _lost(host: int) -> str:
    return f"lockstep: host host-{host} (rank {host}) is lost: nothing has come from it for 10 s"


def test_the_middle_one_of_three_hosts_is_cut_off(net: Network, launched: list[Running]) -> None:
    net.cut(1)
    assert [each.end() for each in launched] == [1, 1, 1]
    assert _last_lines(launched) == [_lost(1), _lost(0), _lost(1)]


def test_the_rendezvous_itself_is_cut_off(net: Network, launched: list[Running]) -> None:
    net.cut(0)
    assert [each.end() for each in launched] == [1, 1, 1]
    first, *others = _last_lines(launched)
    assert others == [_lost(0)] * 2
    assert first in (_lost(1), _lost(2))
    assert launched[0].output.count("note: host host-") == 2


@pytest.mark.parametrize("host", [0, 1])
def test_an_outage_of_five_seconds_is_survived(
    net: Network, launched: list[Running], tmp_path: Path, host: int
) -> None:
    net.cut(host)
    time.sleep(5.0)
    net.join(host)
    reached = _updates(tmp_path)
    launched[0].wait_for(lambda: _updates(tmp_path) > reached + 10)
    launched[0].send(signal.SIGINT)
    assert [each.end() for each in launched] == [75, 75, 75], launched[0].output
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.parametrize("host", [0, 2])
def test_a_launcher_that_is_stopped_for_a_while_is_survived(launched: list[Running], tmp_path: Path, host: int) -> None:
    launched[host].send(signal.SIGSTOP)
    reached = _updates(tmp_path)
    launched[1].wait_for(lambda: _updates(tmp_path) > reached + 10)
    time.sleep(12.0)
    launched[host].send(signal.SIGCONT)
    launched[1].send(signal.SIGINT)
    assert [each.end() for each in launched] == [75, 75, 75], launched[0].output


@pytest.mark.parametrize("host", [0, 2])
def test_a_launcher_that_hangs_does_not_keep_the_others_for_ever(launched: list[Running], host: int) -> None:
    launched[host].send(signal.SIGSTOP)
    rank = launched[host].ranks[-1]
    os.kill(rank, signal.SIGKILL)
    begun = time.monotonic()
    try:
        others = [each for each in launched if each is not launched[host]]
        assert [each.end() for each in others] == [1, 1]
        assert time.monotonic() - begun < 60
        assert "launcher" in _last_lines(others)[0]
    finally:
        os.killpg(launched[host].pid, signal.SIGKILL)
