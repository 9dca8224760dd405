"""Commands of hosts that contradict each other: a sentence on every host within seconds, and exit code 2."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from kit.hosts import Network, needs_hosts, network
from kit.waiting import UNHURRIED

RUN = (
    "train", "digits", "run.steps=8", "launch.device=cpu", "run.folder=run", "--ranks", 1, "optim.lr=0.01",
    "model.width=8",
)  # fmt: skip
TOKEN = {"LOCKSTEP_JOB_TOKEN": "a token that only the hosts know"}
SECONDS = 15  # far below launch.timeout, on a machine that does other things

pytestmark = needs_hosts

# what is wrong -> the further words of hosts 0 and 1, and what both print
ROWS = {
    "numbers of hosts": (
        ("--nodes", 2),
        ("--nodes", 3),
        "host host-1 differs from host host-0 in --nodes (3, not 2); give all hosts the same",
    ),
    "configs": (
        (),
        ("optim.lr=0.02", "run.steps=9"),
        "host host-1 differs from host host-0 in optim.lr, run.steps; give all hosts the same",
    ),
    "interface that isn't there": (
        (),
        ("launch.interface=eth7",),
        "launch.interface: this host has no interface eth7 with an address; it has lo, eth0",
    ),
    "interface without an address": (
        ("launch.interface=empty0",),
        (),
        "launch.interface: this host has no interface empty0 with an address; it has lo, eth0",
    ),
    "node rank out of range": (
        ("--node-rank", 0),
        ("--node-rank", 2),
        "launch.node_rank: 2, but node ranks are 0 to 1",
    ),
}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Network:
    with network(3, tmp_path_factory.mktemp("network")) as hosts:
        hosts.add_interface(0, "empty0")
        yield hosts


@pytest.mark.parametrize("row", ROWS)
def test_what_differs_is_named_on_all_hosts(net: Network, tmp_path: Path, row: str) -> None:
    first, second, text = ROWS[row]
    common = (*RUN, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500")
    launched = [net.start(1, *common, *second, cwd=tmp_path, **TOKEN)]
    if row != "node rank out of range":
        launched.append(net.start(0, *common, *first, cwd=tmp_path, **TOKEN))
    launched[0].wait_for(lambda: launched[0].output)  # its process has been started
    begun = time.monotonic()
    for each in launched:
        assert each.end() == 2, each.output
        assert text in each.output
        assert "Traceback" not in each.output
    assert time.monotonic() - begun < SECONDS
    assert not (tmp_path / "run").exists()


def test_the_same_node_rank_twice_is_named_on_all_hosts(net: Network, tmp_path: Path) -> None:
    common = (*RUN, "--nodes", 3, "--rendezvous", f"{net.address(0)}:29500", "--node-rank")
    launched = [net.start(host, *common, min(host, 1), cwd=tmp_path, **TOKEN) for host in (0, 1, 2)]
    for each in launched:
        assert each.end() == 2, each.output
        assert "both have --node-rank 1; give each host a rank of its own" in each.output


def test_a_host_of_another_job_is_refused_and_the_first_waits_on(net: Network, tmp_path: Path) -> None:
    common = (*RUN, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500", "--job-id")
    launched = [net.start(host, *common, f"job-{host}", cwd=tmp_path, **TOKEN) for host in (0, 1)]
    assert launched[1].end() == 2
    assert "10.77.0.1:29500 refused the job token of host host-1; give all hosts the same" in launched[1].output
    launched[0].wait_for(
        lambda: "a connection from 10.77.0.2 was refused: it has another job token" in launched[0].output
    )
    launched[0].send(signal.SIGINT)
    assert launched[0].end() == 130


def test_a_host_too_many_is_refused_and_the_others_train_on(net: Network, tmp_path: Path) -> None:
    words = (*RUN, "run.steps=100000", UNHURRIED, "monitor.every=1", "recovery.restarts=0")
    common = (*words, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500")
    launched = [net.start(host, *common, cwd=tmp_path, **TOKEN) for host in (0, 1)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    launched[0].wait_for(lambda: metrics.exists() and metrics.stat().st_size)
    third = net.start(2, *common, cwd=tmp_path, **TOKEN)
    assert third.end() == 2
    assert "host host-2 is one too many: all 2 hosts are there: host-0, host-1" in third.output
    launched[1].send(signal.SIGINT)
    assert [each.end() for each in launched] == [75, 75], launched[0].output


@pytest.mark.drill
def test_hosts_that_have_only_ipv6_addresses_train(tmp_path: Path) -> None:
    with network(2, tmp_path, prefix="fd77::") as net:
        common = (*RUN, "--nodes", 2, "--rendezvous", f"[{net.address(0)}]:29500")
        launched = [net.start(host, *common, cwd=tmp_path, **TOKEN) for host in (0, 1)]
        assert [each.end() for each in launched] == [0, 0], launched[0].output + launched[1].output
