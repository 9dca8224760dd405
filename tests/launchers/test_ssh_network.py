"""`lockstep launch ssh` between hosts of a network, which are namespaces, each with an sshd of its own, keys only."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from kit.commands import Running
from kit.hosts import Network, needs_hosts, network
from kit.ssh import SshHosts, processes_in, ssh_hosts, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"a real sshd: {why_not()}"),
    pytest.mark.drill,
    needs_hosts,
]

RUN = (
    "train", "digits", "run.steps=8", "launch.device=cpu", "monitor.every=1", "data.train.shift=0", "run.folder=run",
    "precision.compute=fp32", "optim.name=sgd", "optim.lr=0.01", "evaluation.at_end=false", "checkpoint.every=5",
)  # fmt: skip
ENDLESS = (*RUN, "run.steps=1000000")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as running:
        yield running


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]  # the last may be half written


@contextmanager
def servers(net: Network, keys: SshHosts, folder: Path) -> Iterator[list[Running]]:
    """sshd on all hosts of a network; each listens on all addresses of its host."""
    lines = (keys.folder / "sshd_config").read_text().splitlines(keepends=True)
    (folder / "everywhere").write_text("".join(line for line in lines if not line.startswith("ListenAddress")))
    place = folder / "sshd"
    place.mkdir()
    command = ("/usr/sbin/sshd", "-D", "-e", "-f", folder / "everywhere")
    started = [net.start(host, *command, cwd=place) for host in range(net.hosts)]
    try:
        for server in started:
            server.wait_for(partial(_listens, server))
        yield started
    finally:
        for server in started:
            if server.lives:
                server.send(signal.SIGTERM)
                server.end()


def _listens(server: Running) -> bool:
    return "Server listening on 0.0.0.0" in server.output


def launch(net: Network, keys: SshHosts, folder: Path, hosts: str, *words: object) -> Running:
    """Call the command on host 0, whose known_hosts is empty."""
    trusting = ("--ssh=-oStrictHostKeyChecking=no", "--ssh=-oUserKnownHostsFile=/dev/null")
    common = ("--env", "OMP_NUM_THREADS=1", "--hosts", hosts)
    return net.start(0, "launch", "ssh", keys.option, *trusting, *common, *words, cwd=folder)


def left_on_others(folder: Path) -> dict[int, str]:
    """Processes of the run that are in the working folder, without sshd's and the ended command's."""
    return {pid: words for pid, words in processes_in(folder).items() if "lockstep" in words}


def wait_until_nothing_is_left(folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := left_on_others(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_hosts_meet_where_all_reach_the_first_and_a_host_that_is_cut_off_is_named(
    keys: SshHosts, tmp_path: Path
) -> None:
    """The first resolves its own name to 127.0.1.1, where no other reaches it."""
    with network(2, tmp_path) as net, servers(net, keys, tmp_path):
        launched = launch(net, keys, tmp_path, "host-0:2,host-1:1", *RUN)
        assert launched.end() == 0, launched.output
        assert "--rendezvous 10.77.0.1:" in (tmp_path / "run" / "launch" / "ssh.json").read_text()
        launched = launch(net, keys, tmp_path, "host-0:2,host-1:1", *ENDLESS)
        launched.wait_for(lambda: len(losses(tmp_path / "run")) > 12)
        net.cut(1)
        begun = time.monotonic()
        launched.wait_for(lambda: "host host-1 (rank 2) is lost" in launched.output)
        assert time.monotonic() - begun < 20
        assert launched.end() == 1, launched.output
        wait_until_nothing_is_left(tmp_path, 100)  # host 1's: until nothing has come from the terminal for a minute


def test_the_terminal_goes_and_all_hosts_stop_saved(keys: SshHosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with network(2, tmp_path) as net, servers(net, keys, tmp_path):
        launched = launch(net, keys, tmp_path, "host-0:1,host-1:1", *ENDLESS)
        launched.wait_for(lambda: len(losses(run)) > 12)
        launched.send(signal.SIGHUP, group=True)
        assert launched.end() == 75, launched.output
        wait_until_nothing_is_left(tmp_path, 10)
        steps = losses(run)
        manifests = [int(path.parent.name.rpartition("-")[2]) for path in run.glob("checkpoints/*/manifest.json")]
        assert max(manifests) == len(steps), "saved at the last update"


def test_an_sshd_that_refuses_in_the_middle_is_named_and_the_rest_ends(keys: SshHosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with network(2, tmp_path) as net, servers(net, keys, tmp_path) as started:
        launched = launch(net, keys, tmp_path, "host-0:1,host-1:1", *ENDLESS)
        launched.wait_for(lambda: len(losses(run)) > 12)
        children = Path(f"/proc/{started[1].pid}/task/{started[1].pid}/children").read_text().split()
        started[1].send(signal.SIGTERM)  # listens no more; connections that are there are processes of their own
        started[1].end()
        reached = len(losses(run))
        launched.wait_for(lambda: len(losses(run)) > reached + 5)
        second = launch(net, keys, tmp_path / "sshd", "host-1:1", *RUN, "run.folder=other")
        assert second.end() == 1
        assert "host-1: it can't be reached (" in second.output
        for child in children:  # the connection itself
            os.kill(int(child), signal.SIGKILL)
        assert launched.end() == 75, launched.output
        assert "lockstep: the connection to host-1 is lost: " in launched.output
        wait_until_nothing_is_left(tmp_path, 10)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("eval", "run"), "held-out"),
        (("verify", "digits", "--ranks", "1,2", "--strategies", "ddp", "launch.device=cpu"), "ddp"),
        (("doctor", "--ranks", "2"), "all-reduce"),
    ],
    ids=["eval", "verify", "doctor"],
)
def test_other_verbs_run_on_a_host(words: tuple[str, ...], shown: str, keys: SshHosts, tmp_path: Path) -> None:
    with network(2, tmp_path) as net, servers(net, keys, tmp_path):
        if words[0] == "eval":
            trained = launch(net, keys, tmp_path, "host-0:1,host-1:1", *RUN)
            assert trained.end() == 0, trained.output
        launched = launch(net, keys, tmp_path, "host-1", *words)
        output = tmp_path / "of-host-0"
        code = launched.end()
        assert code == 0, launched.output
        assert shown in (output / "out").read_text() + (output / "err").read_text()
