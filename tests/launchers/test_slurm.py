"""`lockstep launch slurm` under a real Slurm with two nodes: submitted, preempted, queued again, resumed, completed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.commands import Done, run_lockstep
from kit.failures import gives
from kit.slurm import Cluster, cluster, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"a real Slurm: {why_not()}")

STEPS = 12
TRAIN = ["train", "digits", "run.epochs=null", f"run.steps={STEPS}", "evaluation.at_end=false", "model.width=8"]
PREEMPTED = """
import os, subprocess, time
import lockstep

class Preempted(lockstep.extend.Monitor):
    def see(self, report):
        if report.step == 5 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and "SLURM_JOB_ID" in os.environ:
            subprocess.run(["scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
            time.sleep(0.5)  # until the signal is there: the other ranks wait in the next collective
        return ()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def launch(slurm: Cluster, folder: Path, *words: object) -> Done:
    return run_lockstep("launch", "slurm", *words, cwd=folder, **slurm.environment)


def job_of(done: Done) -> str:
    match = re.search(r"slurm job (\d+)", done.stderr)
    assert match, done.stderr
    return match[1]


def test_a_preempted_job_is_queued_again_and_completes(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "preempted.py").write_text(PREEMPTED)
    train = [*TRAIN, "monitors=[{target: preempted.py:Preempted}]"]
    on_two = ["--nodes", "2", "--time", "10", "--follow", *train, "--ranks", "1", "run.folder=run"]
    with ThreadPoolExecutor(2) as beside:
        job_ends = beside.submit(launch, slurm, tmp_path, *on_two)
        restarts = beside.submit(slurm.start_when_requeued, "digits")
        undisturbed = run_lockstep(*train, "--ranks", "2", "run.folder=undisturbed", cwd=tmp_path)
        restarts.result()
        done = job_ends.result()
    assert done.returncode == 0, (done, slurm.logs())
    assert "stopped at step" in done.stdout
    assert "resumes from step" in done.stdout
    job = job_of(done)
    assert gives(done.stderr, job, "COMPLETED", "n[1-2]", "restart 1")
    state = slurm.state(job)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "1", "0:0")

    assert undisturbed.returncode == 0, undisturbed
    compared = json.loads(run_lockstep("ckpt", "diff", "run", "undisturbed", "--json", cwd=tmp_path).stdout)
    assert compared["same"] > 50  # tensors: weights and moments, bitwise
    assert (compared["only_in"], compared["kinds"], compared["values"], compared["state"]) == ([[], []], {}, {}, {})
    assert set(compared["config"]) == {"launch.job_id", "launch.ranks"}

    asked = launch(slurm, tmp_path, "status", "run")
    assert gives(asked.stdout, job, "COMPLETED", "n[1-2]", "restart 1")
    late = launch(slurm, tmp_path, "cancel", job)
    assert late.returncode == 2
    assert late.stderr.endswith(f"nothing to cancel: {asked.stdout}")


def test_what_slurm_refuses_is_one_sentence(slurm: Cluster, tmp_path: Path) -> None:
    done = launch(slurm, tmp_path, "--partition", "nope", *TRAIN)
    assert (done.returncode, done.stdout) == (1, "")
    assert gives(done.stderr, "sbatch", "nope")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    unknown = launch(slurm, tmp_path, "status", "4711")
    assert unknown.returncode == 2
    assert gives(unknown.stderr, "no job 4711")


def test_a_job_is_canceled(slurm: Cluster, tmp_path: Path) -> None:
    done = launch(slurm, tmp_path, "--sbatch=--begin=now+1hour", *TRAIN, "run.folder=run")
    assert done.returncode == 0, done
    job = job_of(done)
    assert launch(slurm, tmp_path, "status", "run").stdout == f"Slurm job {job}: PENDING (BeginTime)\n"
    second = launch(slurm, tmp_path, *TRAIN, "run.folder=run")
    assert second.returncode == 2
    assert f"lockstep launch slurm cancel {job}" in second.stderr
    assert launch(slurm, tmp_path, "cancel", "run").stdout == f"slurm job {job} is canceled\n"
    assert launch(slurm, tmp_path, "follow", job).returncode == 130


FAILING = """
import os
import lockstep

class Failing(lockstep.extend.Monitor):
    def see(self, report):
        if report.step >= 3:
            os._exit(9)
        return ()
"""
STOPPED_RUN = """
import os, subprocess
import lockstep

class Stopped(lockstep.extend.Monitor):
    def see(self, report):
        if report.step == 5 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            subprocess.run(os.environ["AT_STEP_5"], shell=True, check=True)
        return ()
"""


def stopped_run(slurm: Cluster, folder: Path, at_step_5: str, *options: str, steps: int = 400) -> Done:
    """A run on both nodes, or on what the options state, in which a rank executes a command of bash at step 5."""
    (folder / "stopped.py").write_text(STOPPED_RUN)
    train = ["train", "digits", "--ranks", "1", "run.epochs=null", f"run.steps={steps}", "run.folder=run"]
    words = ["launch", "slurm", "--follow", *options, *train, "monitors=[{target: stopped.py:Stopped}]"]
    return run_lockstep(*words, cwd=folder, AT_STEP_5=at_step_5, **slurm.environment)


@pytest.mark.drill
def test_a_job_that_another_preempts_resumes(slurm: Cluster, tmp_path: Path) -> None:
    urgent = "echo '#!/bin/sh' | sbatch --partition urgent --nodes 2 --exclusive --output /dev/null"
    done = stopped_run(slurm, tmp_path, urgent, "--nodes", "2")
    assert done.returncode == 0, (done, slurm.logs())
    assert "DUE TO PREEMPTION" in done.stdout
    assert "resumes from step" in done.stdout
    assert gives(done.stderr, "COMPLETED", "n[1-2]", "restart 1")


@pytest.mark.drill
def test_a_job_is_warned_of_its_time_limit(slurm: Cluster, tmp_path: Path) -> None:
    done = stopped_run(slurm, tmp_path, "sleep 150", "--time", "2", "--signal-before", "60", steps=12)
    assert done.returncode == 0, (done, slurm.logs())
    assert "TIME LIMIT" not in done.stdout
    assert "resumes from step" in done.stdout


@pytest.mark.drill
def test_of_a_sweep_only_the_preempted_run_starts_again(slurm: Cluster, tmp_path: Path) -> None:
    first = 'if [ "$SLURM_ARRAY_TASK_ID" = 1 ]; then scancel --signal=USR1 "${SLURM_ARRAY_JOB_ID}_1"; sleep 0.5; fi'
    done = stopped_run(slurm, tmp_path, first, "--sweep", "optim.lr=0.1,0.01", "--sweep", "run.seed=1,2", steps=12)
    assert done.returncode == 0, (done, slurm.logs())
    states = [line for line in done.stderr.splitlines() if line.startswith("Slurm job")]
    ends = sorted(line.partition("_")[2] for line in states[-4:])
    assert [line[:12] for line in ends] == ["0: COMPLETED", "1: COMPLETED", "2: COMPLETED", "3: COMPLETED"]
    assert [line.endswith("restart 1") for line in ends] == [False, True, False, False]
    assert all((tmp_path / "run" / str(number) / "summary.json").is_file() for number in range(4))


@pytest.mark.drill
@pytest.mark.parametrize("attempt", range(10))
def test_both_nodes_end_with_75(slurm: Cluster, tmp_path: Path, attempt: int) -> None:
    preempt = 'scancel --signal=USR1 "$SLURM_JOB_ID"; sleep 0.5'
    done = stopped_run(slurm, tmp_path, preempt, "--nodes", "2", "--no-requeue", steps=50)
    assert done.returncode == 75, (done, slurm.logs())


@pytest.mark.drill
def test_a_failure_is_not_tried_again(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    failing = [*TRAIN, "--ranks", "1", "monitors=[{target: failing.py:Failing}]"]
    done = launch(slurm, tmp_path, "--nodes", "2", "--follow", *failing)
    assert done.returncode == 1, done
    assert gives(done.stdout, "rank 0", "n1", "exit code 9")
    assert gives(done.stderr, "FAILED", "n[1-2]", "exit code 1")


@pytest.mark.drill
def test_a_running_job_that_is_canceled_saves(slurm: Cluster, tmp_path: Path) -> None:
    done = stopped_run(slurm, tmp_path, 'scancel "$SLURM_JOB_ID"', "--nodes", "2", steps=4000)
    assert done.returncode == 130, (done, slurm.logs())
    assert "and saved; start it again to resume" in done.stdout
    assert "restart" not in done.stderr


@pytest.mark.drill
def test_the_doctor_measures_between_nodes(slurm: Cluster, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path), **slurm.environment}
    words = ["launch", "slurm", "--nodes", 2, "--follow", "doctor", "--ranks", 2, "--size", "1KiB"]
    done = run_lockstep(*words, cwd=tmp_path, **cache)
    assert done.returncode == 0, (done, slurm.logs())
    assert gives(done.stdout, "4 ranks", "2 hosts", "(n1, n2)", "gloo", "cpu")
    assert "6 operations gave the right values on all ranks" in done.stdout
    assert re.search(r"^0-2 ", done.stdout, re.MULTILINE)
    alone = run_lockstep("launch", "slurm", "--follow", "doctor", cwd=tmp_path, **cache)
    assert alone.returncode == 0, (alone, slurm.logs())
    assert "ok        torch" in alone.stdout
