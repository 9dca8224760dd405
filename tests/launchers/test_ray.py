"""`lockstep launch ray` on a real Ray cluster: two nodes train as one process; lost nodes, stops, what doesn't fit."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kit.commands import Done, Running, run_lockstep, start_lockstep
from kit.failures import gives
from kit.ray import CPUS, GPUS, RayCluster, ray_cluster, why_not
from kit.ssh import processes_in

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"a real Ray: {why_not()}")

RUN = (
    "train", "digits", "run.steps=8", "launch.device=cpu", "monitor.every=1", "data.train.shift=0", "run.folder=run",
    "precision.compute=fp32", "optim.name=sgd", "optim.lr=0.01", "evaluation.at_end=false", "checkpoint.every=5",
)  # fmt: skip
LAUNCH = ("launch", "ray", "--env", "OMP_NUM_THREADS=1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as running:
        yield running


def launch(cluster: RayCluster, folder: Path, *words: object) -> Done:
    return run_lockstep(*LAUNCH, "--address", cluster.address, *words, cwd=folder)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_losses(folder: Path) -> None:
    """The run has the losses of a single process."""
    alone = run_lockstep(*RUN, "--ranks", 1, "run.folder=alone", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=2e-6)


def test_a_jobs_driver_places_two_launchers_that_train_as_one_process(tmp_path: Path) -> None:
    """What a job executes, on real nodes, without the dashboard that would start it."""
    planned = run_lockstep(*LAUNCH, "--dry-run", "--nodes", 2, *RUN, "--ranks", 1, cwd=tmp_path)
    entrypoint = shlex.split(json.loads(planned.stdout)["entrypoint"])
    with ray_cluster(dashboard=False) as cluster:
        done = run_lockstep(*entrypoint[1:], cwd=tmp_path, RAY_ADDRESS=cluster.nodes)
    assert done.returncode == 0, done
    assert re.match(r"lockstep: .* on \S+, \S+, .*1 CPU ", done.stdout)
    assert "step 8/8" in done.stdout, "node 0's output"
    assert processes_in(tmp_path) == {}
    assert_same_losses(tmp_path)


@pytest.mark.drill
def test_a_job_is_submitted_and_followed_to_its_end(cluster: RayCluster, tmp_path: Path) -> None:
    done = launch(cluster, tmp_path, "--nodes", 2, "--follow", *RUN, "--ranks", 1)
    assert done.returncode == 0, done
    assert "step 8/8" in done.stdout
    assert "job_manager" not in done.stdout + done.stderr
    record = json.loads((tmp_path / "run/launch/job.json").read_text())
    assert record["job"].startswith(f"{cluster.address}/digits-")
    status = run_lockstep("launch", "ray", "status", "run", cwd=tmp_path)
    assert status.stdout.endswith(": SUCCEEDED\n")
    assert_same_losses(tmp_path)


@pytest.mark.drill
def test_what_the_cluster_does_not_have_is_refused_in_seconds(cluster: RayCluster, tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch(cluster, tmp_path, "--follow", "--nodes", 3, *RUN, "--ranks", 1)
    assert done.returncode == 2
    last = done.stdout.splitlines()[-1]
    assert gives(last, "3 nodes", "1 CPU", 2, "2 nodes", f"{CPUS} CPU, {GPUS} GPU", "--wait SECONDS")
    assert time.monotonic() - began < 120
    done = launch(cluster, tmp_path, "--follow", "--resource", "accelerator_type:H100=1", *RUN, "--ranks", 1)
    assert done.returncode == 2
    assert gives(done.stdout, "1 CPU", "1 accelerator_type:H100", 0)


@pytest.mark.drill
def test_a_missing_program_or_folder_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    done = launch(cluster, tmp_path, "--follow", "--program", "/opt/none/lockstep", *RUN, "--ranks", 1)
    assert done.returncode == 1
    assert "/opt/none/lockstep: not found" in done.stdout
    done = launch(cluster, tmp_path, "--follow", "--folder", "/no/folder", *RUN, "--ranks", 1)
    assert done.returncode == 1
    assert gives(done.stdout, "/no/folder")


@pytest.mark.drill
def test_a_node_shows_its_gpus_and_a_failure_keeps_its_exit_code(cluster: RayCluster, tmp_path: Path) -> None:
    done = launch(cluster, tmp_path, "--gpus-per-node", GPUS, "--cpus-per-node", 1, "--follow", "doctor")
    assert "CUDA_VISIBLE_DEVICES=0,1" in done.stdout
    assert "OMP_NUM_THREADS=1" in done.stdout
    assert done.returncode in (0, 3), "doctor's own"
    done = launch(cluster, tmp_path, "--follow", *RUN, "--ranks", 1, "model.kind=none.py:Missing")
    assert done.returncode == 2, done


def start(cluster: RayCluster, folder: Path, *options: object) -> Running:
    """An endless run on two nodes, once it has saved."""
    launched = start_lockstep(
        *LAUNCH, "--address", cluster.address, "--nodes", 2, "--follow", *options, *RUN, "--ranks", 1,
        "run.steps=1000000", cwd=folder,
    )  # fmt: skip
    launched.wait_for(lambda: any(folder.glob("run/checkpoints/*/manifest.json")))
    return launched


def printed(folder: Path) -> str:
    """What a job that is followed has printed."""
    return (folder / "out").read_text()


def of_node(node: int, folder: Path) -> list[int]:
    """Processes of a launcher and its ranks, in the order of their start."""
    return sorted(pid for pid, words in processes_in(folder).items() if f"--node-rank {node}" in words)


def variables_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/environ").read_text().split("\0")


@pytest.mark.drill
def test_cancel_saves_and_stops_all_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    launched = start(cluster, tmp_path)
    [token] = [text for text in variables_of(of_node(1, tmp_path)[0]) if text.startswith("LOCKSTEP_JOB_TOKEN=")]
    secret = token.partition("=")[2]
    assert len(secret) == 64
    assert not any(secret in words for words in processes_in(tmp_path).values())
    assert not any(secret.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    second = launch(cluster, tmp_path, "--nodes", 2, *RUN, "--ranks", 1)
    assert second.returncode == 2
    assert "this run has a job already" in second.stderr
    assert run_lockstep("launch", "ray", "cancel", "run", cwd=tmp_path).returncode == 0
    assert launched.end() == 130, launched.output
    assert "as requested, and saved" in printed(tmp_path)
    assert processes_in(tmp_path) == {}
    again = run_lockstep("launch", "ray", "cancel", "run", cwd=tmp_path)
    assert again.returncode == 2
    assert "there is nothing to cancel: Ray job digits-" in again.stderr


@pytest.mark.drill
def test_preempted_ranks_save_and_the_job_ends_with_75(cluster: RayCluster, tmp_path: Path) -> None:
    launched = start(cluster, tmp_path)
    os.kill(of_node(1, tmp_path)[0], signal.SIGUSR1)
    assert launched.end() == 75, launched.output
    done = launch(
        cluster,
        tmp_path,
        "--nodes",
        2,
        "--follow",
        *RUN,
        "--ranks",
        1,
        f"run.steps={len(losses(tmp_path / 'run')) + 5}",
    )
    assert done.returncode == 0, done
    assert "resumes from step" in done.stdout


@pytest.mark.drill
def test_a_killed_driver_leaves_nothing_running_and_all_saved(cluster: RayCluster, tmp_path: Path) -> None:
    launched = start(cluster, tmp_path)
    [driver] = [pid for pid, words in processes_in(tmp_path).items() if "launch on-ray" in words and "/sh" not in words]
    os.kill(driver, signal.SIGKILL)
    assert launched.end() == 1, launched.output
    deadline = time.monotonic() + 30
    while left := processes_in(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (tmp_path / f"run/checkpoints/step-{steps[-1]:08}/manifest.json").exists()


@pytest.mark.drill
def test_a_lost_node_is_named_and_replaced_if_asked(cluster: RayCluster, tmp_path: Path) -> None:
    launched = start(cluster, tmp_path)
    lose_node(cluster, tmp_path)
    assert launched.end() == 1, launched.output
    assert re.search(r"connection to \S+ is lost", printed(tmp_path))
    cluster.do("add")
    launched = start(cluster, tmp_path, "--retries", 1, "--wait", 120)
    launched.wait_for(lambda: "resumes from" in printed(tmp_path) and ": saved (" in printed(tmp_path))
    reached = len(losses(tmp_path / "run"))
    lose_node(cluster, tmp_path)
    cluster.do("add")
    launched.wait_for(lambda: "retry 1 of 1" in printed(tmp_path))
    launched.wait_for(
        lambda: len(losses(tmp_path / "run")) > reached + 5 and printed(tmp_path).count("resumes from") > 1
    )
    assert run_lockstep("launch", "ray", "cancel", "run", cwd=tmp_path).returncode == 0
    assert launched.end() == 130, launched.output


def lose_node(cluster: RayCluster, folder: Path) -> None:
    """Kill all processes of the node beside the head: Ray's, and those of the run there."""
    variables = {pid: dict(text.partition("=")[::2] for text in variables_of(pid)) for pid in processes_in(folder)}
    raylets = {pid: int(those["RAY_RAYLET_PID"]) for pid, those in variables.items() if "RAY_RAYLET_PID" in those}
    cluster.do("remove")
    for pid, raylet in raylets.items():
        if not Path(f"/proc/{raylet}").exists():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
