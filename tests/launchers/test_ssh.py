"""`lockstep launch ssh` over a real sshd: checked, started on two hosts, followed, stopped, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kit.commands import Done, Running, run_lockstep, start_lockstep
from kit.failures import gives
from kit.ssh import SshHosts, processes_in, ssh_hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"a real sshd: {why_not()}")

RUN = (
    "train", "digits", "run.steps=8", "launch.device=cpu", "monitor.every=1", "data.train.shift=0", "run.folder=run",
    "precision.compute=fp32", "optim.name=sgd", "optim.lr=0.01", "evaluation.at_end=false", "checkpoint.every=5",
    "model.layers=1", "model.width=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as running:
        yield running


def launch(hosts: SshHosts, folder: Path, *words: object) -> Done:
    return run_lockstep("launch", "ssh", hosts.option, "--env", "OMP_NUM_THREADS=1", *words, cwd=folder)


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]  # the last may be half written


def test_two_hosts_with_two_and_one_rank_train_as_one_process(hosts: SshHosts, tmp_path: Path) -> None:
    alone = run_lockstep(*RUN, "--ranks", 1, "run.folder=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    done = launch(hosts, tmp_path, "--hosts", "a:2,b:1", *RUN)
    assert done.returncode == 0, done
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    assert processes_in(tmp_path) == {}


def test_all_that_is_wrong_with_any_host_is_in_one_message(hosts: SshHosts, tmp_path: Path) -> None:
    done = launch(hosts, tmp_path, "--hosts", "a,b,c,d,nowhere.invalid", *RUN)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert gives(lines[0], 3, "5 hosts")
    assert gives(lines[1], "c:", "Host key verification failed", "ssh c true")
    assert gives(lines[2], "d:", "Connection refused", "ssh d true")
    assert gives(lines[3], "nowhere.invalid:")
    assert len(lines) == 4
    assert not (tmp_path / "run").exists()
    assert processes_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--program", "/opt/none/lockstep"), "Lockstep is not there ("),
        (("--program", "false"), "Lockstep has ended there with 1: "),
        (("--folder", "/no/folder"), "its working folder /no/folder can't be entered (No such file or directory); "),
        (("--ssh=-oIdentityFile=none", "--ssh=-Fconfig"), "it can't be reached ("),
    ],
    ids=["program", "no-lockstep", "folder", "key"],
)
def test_a_missing_thing_is_named_with_its_remedy(
    options: tuple[str, ...], message: str, hosts: SshHosts, tmp_path: Path
) -> None:
    without_key = (hosts.folder / "config").read_text().replace(f"{hosts.folder}/user\n", "/none\n")
    (tmp_path / "config").write_text(without_key)
    done = launch(hosts, tmp_path, *options, "--hosts", "a,b", *RUN)
    assert done.returncode == 1
    assert f"\n  b: {message}" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def start(hosts: SshHosts, folder: Path, options: Sequence[str] = ()) -> Running:
    """An endless run on two hosts, once it has saved."""
    common = ("--env", "OMP_NUM_THREADS=1", "--hosts", "a:1,b:1", *options)
    launched = start_lockstep("launch", "ssh", hosts.option, *common, *RUN, "run.steps=1000000", cwd=folder)
    launched.wait_for(lambda: any(folder.glob("run/checkpoints/*/manifest.json")))
    return launched


def continues(launched: Running, folder: Path, text: str = "lockstep: round 2 trains on 2 hosts") -> None:
    """Assert that a run continues after it has printed the text, on both hosts, and can be stopped then."""
    launched.wait_for(lambda: text in launched.output)
    reached = len(losses(folder / "run"))
    launched.wait_for(lambda: len(losses(folder / "run")) > reached + 2)
    assert {node: bool(of_node(node, folder)) for node in (0, 1)} == {0: True, 1: True}
    launched.send(signal.SIGINT)
    assert launched.end() == 75, launched.output
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    # a killed rank 0 may lack the line of its last milliseconds
    assert steps == sorted(set(steps))
    assert steps[-1] <= len(steps) + 1
    assert processes_in(folder) == {}


def of_node(node: int, folder: Path) -> list[int]:
    """Processes of a launcher and its ranks, in the order of their start."""
    return sorted(pid for pid, words in processes_in(folder).items() if f"--node-rank {node}" in words)


def token_of(process: int) -> str:
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    return next(text for text in variables if text.startswith("LOCKSTEP_JOB_TOKEN=")).partition("=")[2]


def wait_until_nothing_is_left(folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_in(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_ctrl_c_stops_all_hosts_saved_and_sigkill_leaves_nothing_there(hosts: SshHosts, tmp_path: Path) -> None:
    launched = start(hosts, tmp_path)
    token = token_of(of_node(1, tmp_path)[0])
    assert len(token) == 64
    assert not any(token in words for words in processes_in(tmp_path).values())
    assert not any(token.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    launched.send(signal.SIGINT, group=True)
    assert launched.end() == 75, launched.output
    assert processes_in(tmp_path) == {}
    reached = losses(tmp_path / "run")
    launched = start(hosts, tmp_path)
    launched.wait_for(lambda: len(losses(tmp_path / "run")) > len(reached) + 2)
    launched.send(signal.SIGKILL)
    wait_until_nothing_is_left(tmp_path, 15)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.drill
def test_a_rank_that_is_killed_on_the_second_host_is_named(hosts: SshHosts, tmp_path: Path) -> None:
    launched = start(hosts, tmp_path)
    os.kill(of_node(1, tmp_path)[-1], signal.SIGKILL)
    continues(launched, tmp_path)
    assert re.search(r"lockstep: rank 1 \S*.*SIGKILL", launched.output)


def hides_on_b(folder: Path, name: str) -> Path:
    """A program, Lockstep's, that has another, empty folder of this name on b."""
    lockstep, program = Path(sys.executable).with_name("lockstep"), folder / "hides"
    program.write_text(
        f"""#!/bin/sh
case "$SSH_CONNECTION" in
*127.0.0.3*) exec unshare --mount sh -c 'mount -t tmpfs none {folder / name} && exec {lockstep} "$@"' - "$@" ;;
esac
exec {lockstep} "$@"
"""
    )
    program.chmod(0o755)
    (folder / name).mkdir()
    return program


def test_hosts_that_share_no_folder_are_refused(hosts: SshHosts, tmp_path: Path) -> None:
    hidden = hides_on_b(tmp_path, "data")
    done = launch(hosts, tmp_path, "--program", hidden, "--hosts", "a:1,b:1", *RUN, "run.folder=data/run")
    assert done.returncode == 2
    assert gives(done.stderr, "checkpoint.folder")


@pytest.mark.drill
def test_the_second_ctrl_c_stops_all_at_once(hosts: SshHosts, tmp_path: Path) -> None:
    launched = start(hosts, tmp_path)
    os.kill(of_node(1, tmp_path)[-1], signal.SIGSTOP)  # a rank that no longer ends its update
    launched.send(signal.SIGINT)
    time.sleep(1)
    assert launched.lives
    launched.send(signal.SIGINT)
    assert launched.end() == 130, launched.output
    assert processes_in(tmp_path) == {}


@pytest.mark.drill
def test_a_lost_connection_saves_and_stops_all(hosts: SshHosts, tmp_path: Path) -> None:
    launched = start(hosts, tmp_path)
    clients = [pid for pid, words in processes_in(tmp_path).items() if words.startswith("ssh ") and " -- b " in words]
    os.kill(clients[0], signal.SIGKILL)
    assert launched.end() == 75, launched.output
    assert "lockstep: the connection to b is lost: " in launched.output
    assert processes_in(tmp_path) == {}


@pytest.mark.drill
@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_is_killed_ends_all_saved(hosts: SshHosts, tmp_path: Path, node: int) -> None:
    launched = start(hosts, tmp_path)
    os.kill(of_node(node, tmp_path)[0], signal.SIGKILL)
    assert launched.end() == 137, launched.output
    assert processes_in(tmp_path) == {}
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    manifests = [int(path.parent.name.rpartition("-")[2]) for path in tmp_path.glob("run/checkpoints/*/manifest.json")]
    assert max(manifests) >= steps[-1] - 5


@pytest.mark.drill
def test_a_host_that_hangs_is_killed_after_its_grace(hosts: SshHosts, tmp_path: Path) -> None:
    launched = start(hosts, tmp_path, options=("--grace", "2"))
    for pid in of_node(1, tmp_path):
        os.kill(pid, signal.SIGSTOP)
    launched.send(signal.SIGKILL)
    wait_until_nothing_is_left(tmp_path, 30)


@pytest.mark.drill
def test_a_launcher_that_fails_before_the_hosts_meet_ends_the_others(hosts: SshHosts, tmp_path: Path) -> None:
    program = hides_on_b(tmp_path, "recipes")
    (tmp_path / "recipes" / "own.yaml").write_text("{}")
    words = [*RUN[:2], "recipes/own.yaml", *RUN[2:]]
    done = launch(hosts, tmp_path, "--program", program, "--hosts", "a:1,b:1", *words)
    assert done.returncode == 2, done
    assert gives(done.stderr, "host b", 2)
    assert "recipes/own.yaml" in done.stderr
    assert processes_in(tmp_path) == {}


@pytest.mark.drill
def test_a_job_is_asked_and_canceled_by_the_folder_of_its_run(hosts: SshHosts, tmp_path: Path) -> None:
    launched = start(hosts, tmp_path)
    status = run_lockstep("launch", "ssh", "status", "run", cwd=tmp_path)
    assert gives(status.stdout, "a, b", "runs", launched.pid)
    second = launch(hosts, tmp_path, "--hosts", "a,b", *RUN)
    assert second.returncode == 2
    assert "this run has a job already" in second.stderr
    assert run_lockstep("launch", "ssh", "cancel", "run", cwd=tmp_path).returncode == 0
    assert launched.end() == 75, launched.output
    status = run_lockstep("launch", "ssh", "status", "run", cwd=tmp_path)
    assert gives(status.stdout, "a, b", "exit code 75")


@pytest.mark.drill
def test_the_doctor_measures_between_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    words = ("--hosts", "a,b:2", "--env", f"XDG_CACHE_HOME={tmp_path}", "doctor", "--ranks", 1, "--size", "1KiB")
    done = launch(hosts, tmp_path, *words)
    assert done.returncode == 0, done
    assert "6 operations gave the right values on all ranks" in done.stdout
    assert re.search(r"^3 ranks on ", done.stdout, re.MULTILINE)
