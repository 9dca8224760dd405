"""Runs on several hosts, which are network namespaces: one launcher on each."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from kit.commands import Running, run_lockstep, start_lockstep
from kit.failures import fails, gives
from kit.hosts import folder_of, needs_hosts, network
from kit.waiting import UNHURRIED, wait_until
from kit.worlds import free_port

from lockstep.config.schema import Launch
from lockstep.core.errors import ConfigError
from lockstep.core.failure_kinds import FailureKind
from lockstep.launch import rendezvous
from lockstep.launch.ends_file import read_ends

RUN = (
    "train", "digits", "run.steps=8", "launch.device=cpu", "monitor.every=1", "data.train.shift=0", "run.folder=run",
    "precision.compute=fp32", "optim.name=sgd", "optim.lr=0.01", "evaluation.at_end=false", "checkpoint.every=5",
    "recovery.restarts=0", "model.width=8",
)  # fmt: skip
TOKEN = {"LOCKSTEP_JOB_TOKEN": "a token that only the hosts know"}


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]  # the last may be half written


def prints(launcher: Running, text: str) -> bool:
    return text in launcher.output


def has_relay(launcher: Running) -> bool:
    return bool(launcher.ranks)  # its children


@needs_hosts
def test_two_hosts_with_two_and_one_rank_train_as_one_process(tmp_path: Path) -> None:
    alone = run_lockstep(*RUN, "--ranks", 1, "run.folder=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    with network(2, tmp_path) as net:
        common = (*RUN, "--nodes", 2, "--rendezvous", "host-0:29500")  # which host 0 resolves to 127.0.1.1
        second = net.start(1, *common, "--node-rank", 1, "--ranks", 1, cwd=tmp_path, **TOKEN)
        first = net.start(0, *common, "--node-rank", 0, "--ranks", 2, cwd=tmp_path, **TOKEN)
        codes = [first.end(), second.end()]
    assert codes == [0, 0], first.output + second.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN["LOCKSTEP_JOB_TOKEN"].encode() in path.read_bytes() for path in files)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    assert gives(first.output, "2 hosts", "host-0 (ranks 0 and 1)", "node 0", "host-1 (rank 2)")
    assert gives(second.output, "host-1 (rank 2)", "node 1")
    names = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert names == ["ends-1.jsonl", "ends.jsonl", *(f"rank-{n}.log" for n in range(3))]
    end, other = read_ends(tmp_path / "run" / "logs")
    assert (end.kind, end.cause, end.step) == (FailureKind.DONE, None, 8)
    assert [(rank.rank, rank.host, rank.kind.name) for rank in end.ranks] == [
        (0, "host-0", "DONE"), (1, "host-0", "DONE"), (2, "host-1", "DONE")
    ]  # fmt: skip
    assert (sorted(end.logs), sorted(other.logs), other.attempt) == ([0, 1], [2], end.attempt)


def test_node_0_knows_its_own_name_before_the_name_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod is NAME-0 in its own /etc/hosts at once, and NAME-0.SERVICE in the cluster's name server seconds later."""
    known = {"train-0": "127.0.0.1"}

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(socket, "gethostname", lambda: "train-0")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = free_port()
    listener = rendezvous._listener(Launch(nodes=2, node_rank=0), "train-0.train", port)
    assert listener is not None
    with listener:
        assert listener.getsockname()[1] == port
    with fails(ConfigError, "other-0.train", key="launch.rendezvous"):
        rendezvous._listener(Launch(nodes=2, node_rank=0), "other-0.train", port)


@needs_hosts
def test_a_host_that_is_cut_off_is_named_by_both_and_the_run_resumes(tmp_path: Path) -> None:
    """The second time, Ctrl-C at one host saves and stops both."""
    run = tmp_path / "run"
    with network(2, tmp_path) as net:
        words = (*RUN, "run.steps=100000", UNHURRIED)
        common = (*words, "--ranks", 1, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500")
        launched = [net.start(host, *common, cwd=tmp_path, silence=4.0, **TOKEN) for host in (1, 0)]
        launched[0].wait_for(lambda: len(list(run.glob("checkpoints/*/manifest.json"))) > 1)
        net.cut(1)
        begun = time.monotonic()
        for lost, launcher in enumerate(launched):
            note = f"note: host host-{lost} (rank {lost}) is lost: nothing has come from it for 4 s; the run ends\n"
            launcher.wait_for(partial(prints, launcher, note))
        assert time.monotonic() - begun < 7, "before the ranks that wait in a collective are killed"
        assert all(launcher.lives for launcher in launched)
        codes = [launcher.end() for launcher in launched]
        assert codes == [1, 1]
        assert time.monotonic() - begun < 34
        assert gives(launched[0].output, "host-0 (rank 0)", "lost", "4 s")
        assert gives(launched[1].output, "host-1 (rank 1)", "lost", "4 s")

        net.join(1)
        reached = len(losses(run))  # at least the steps of the newest checkpoint, from which it resumes
        launched = [net.start(host, *common, cwd=tmp_path, **TOKEN) for host in (1, 0)]
        launched[0].wait_for(lambda: len(losses(run)) > reached + 5)
        launched[0].send(signal.SIGUSR2)
        launched[1].wait_for(lambda: "saves after this update, and continues" in launched[1].output)
        launched[0].send(signal.SIGINT)
        assert [launcher.end() for launcher in launched] == [75, 75], launched[0].output + launched[1].output
        ends = [launcher.output.splitlines()[-1] for launcher in launched]
        assert ends[0] == ends[1]
        assert "saved" in ends[0]
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == [*range(1, len(steps) + 1)], "no step is missing, and none is there twice"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_before_all_hosts_are_there_ends_those_that_are(tmp_path: Path, stopped: int) -> None:
    port = free_port()
    launched = []
    for host in range(2):
        folder = tmp_path / f"host-{host}"
        folder.mkdir()
        command = (*RUN, "--ranks", 1, "--nodes", 3, "--rendezvous", f"127.0.0.1:{port}", "--node-rank", host)
        launched.append(start_lockstep(*command, cwd=folder))
        launched[host].wait_for(partial(has_relay, launched[host]))
    wait_until(lambda: any(each.laddr[1:] == (port,) and each.raddr for each in psutil.net_connections("tcp4")))
    time.sleep(1.0)  # until they have met: nothing shows that
    launched[stopped].send(signal.SIGINT)
    assert [launcher.end() for launcher in launched] == [130, 130], launched[1 - stopped].output
    assert launched[stopped].output.endswith("lockstep: stopped by SIGINT\n")
    assert launched[1 - stopped].output.endswith(f"lockstep: stopped on host {socket.gethostname()}\n")
    assert not any((tmp_path / f"host-{host}" / "run").exists() for host in range(2))


@pytest.mark.drill
@needs_hosts
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_on_hosts_whose_names_are_loopback_addresses(tmp_path: Path, rendezvous: str) -> None:
    """Before, gloo connected to 127.0.1.1, unless GLOO_SOCKET_IFNAME was set."""
    with network(2, tmp_path) as net:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{net.address(0)}:29500", "--rdzv-id", "job"]
        if rendezvous == "static":
            meeting = ["--master-addr", "host-0", "--master-port", "29500"]
        torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nnodes", 2)

        def leads(host: int) -> list[str]:  # torchrun doesn't find 10.77.0.1 by the hostname
            return [] if rendezvous == "static" else ["--rdzv-conf", f"is_host={1 - host}"]

        ranks, program = ("--nproc-per-node", 1), ("-m", "lockstep", *RUN)
        launched = [
            net.start(host, *torchrun, *ranks, "--node-rank", host, *meeting, *leads(host), *program, cwd=tmp_path)
            for host in range(2)
        ]
        assert [launcher.end() for launcher in launched] == [0, 0], launched[0].output + launched[1].output
    assert len(losses(tmp_path / "run")) == 8


@pytest.mark.drill
@needs_hosts
@pytest.mark.parametrize(
    "strategy",
    [("parallel.strategy=ddp",), ("parallel.strategy=fsdp",), ("parallel.strategy=ddp", "parallel.pipeline=3")],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_three_hosts_train_as_one_process(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    alone = run_lockstep(*RUN, "--ranks", 1, "run.folder=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    with network(3, tmp_path) as net:
        common = (*RUN, *strategy, "--nodes", 3, "--rendezvous", f"{net.address(0)}:29500", "--ranks", 1)
        launched = [net.start(host, *common, cwd=tmp_path, **TOKEN) for host in (2, 0, 1)]
        assert [launcher.end() for launcher in launched] == [0, 0, 0], launched[1].output
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)


@needs_hosts
def test_hosts_without_a_shared_folder_are_refused(tmp_path: Path) -> None:
    with network(2, tmp_path) as net:
        common = (*RUN, "--ranks", 1, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500", "launch.timeout=4")
        launched = [net.start(1, *common, cwd=tmp_path, hides=tmp_path / "run", **TOKEN)]
        launched.append(net.start(0, *common, cwd=tmp_path, **TOKEN))
        assert [launcher.end() for launcher in launched] == [2, 2], launched[0].output + launched[1].output
    for launcher in launched:
        assert gives(launcher.output, "ranks 1", "rank 0", "written")


@pytest.mark.drill
@needs_hosts
def test_a_run_is_not_resumed_where_a_host_does_not_see_its_checkpoints(tmp_path: Path) -> None:
    """The other host has an empty folder, and then an older copy of the run."""
    run = tmp_path / "run"
    with network(2, tmp_path) as net:
        common = (*RUN, "--ranks", 1, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500", "launch.timeout=4")
        first = [net.start(host, *common, cwd=tmp_path, **TOKEN) for host in (0, 1)]
        assert [launcher.end() for launcher in first] == [0, 0], first[0].output + first[1].output
        before = sorted(path.name for path in (run / "checkpoints").iterdir())
        for older in (False, True):
            if older:
                shutil.copytree(run, folder_of(1, run), dirs_exist_ok=True)
            again = (*common, "run.steps=12")
            launched = [
                net.start(1, *again, cwd=tmp_path, hides=run, **TOKEN),
                net.start(0, *again, cwd=tmp_path, **TOKEN),
            ]
            assert [launcher.end() for launcher in launched] == [2, 2], launched[0].output + launched[1].output
            for launcher in launched:
                assert gives(launcher.output, "ranks 1", "rank 0", "written")
            assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
        launched = [net.start(host, *again, cwd=tmp_path, **TOKEN) for host in (1, 0)]
        assert [launcher.end() for launcher in launched] == [0, 0], launched[0].output + launched[1].output
    assert len(losses(run)) == 12


@pytest.mark.drill
@needs_hosts
def test_hosts_that_share_only_the_checkpoints_train_and_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with network(2, tmp_path) as net:
        common = (*RUN, "parallel.strategy=fsdp", "--ranks", 1, "--nodes", 2, "checkpoint.folder=shared")
        for steps in (8, 12):
            words = (*common, f"run.steps={steps}", "--rendezvous", f"{net.address(0)}:29500")
            launched = [
                net.start(1, *words, cwd=tmp_path, hides=run, **TOKEN),
                net.start(0, *words, cwd=tmp_path, **TOKEN),
            ]
            assert [launcher.end() for launcher in launched] == [0, 0], launched[0].output + launched[1].output
            assert len(losses(run)) == steps
    assert (run / "summary.json").is_file()
    assert not (run / "logs" / "rank-1.log").exists()
    assert (folder_of(1, run) / "logs" / "rank-1.log").is_file(), "each host keeps its logs"
    assert sorted(path.name for path in folder_of(1, run).iterdir()) == ["logs"], "rank 0's host writes the rest"
