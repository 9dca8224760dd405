"""`lockstep launch slurm` under a real Slurm with two nodes: submitted, preempted, queued again, resumed, completed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.commands import Done, run_lockstep
from kit.slurm import Cluster, cluster, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"a real Slurm: {why_not()}")

STEPS = 12
TRAIN = ["train", "digits", "run.epochs=null", f"run.steps={STEPS}", "evaluation.at_end=false"]
PREEMPTED = """
import os, subprocess, time
import lockstep

class Preempted(lockstep.Monitor):
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
    with ThreadPoolExecutor(1) as beside:
        job_ends = beside.submit(launch, slurm, tmp_path, *on_two)
        undisturbed = run_lockstep(*train, "--ranks", "2", "run.folder=undisturbed", cwd=tmp_path)
        done = job_ends.result()
    assert done.returncode == 0, (done, slurm.logs())
    assert "stopped at step" in done.stdout
    assert "resumes from step" in done.stdout
    job = job_of(done)
    assert f"Slurm job {job}: COMPLETED, on n[1-2], restart 1" in done.stderr
    state = slurm.state(job)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "1", "0:0")

    assert undisturbed.returncode == 0, undisturbed
    compared = json.loads(run_lockstep("ckpt", "diff", "run", "undisturbed", "--json", cwd=tmp_path).stdout)
    assert compared["same"] > 50  # tensors: weights and moments, bitwise
    assert (compared["only_in"], compared["kinds"], compared["values"], compared["state"]) == ([[], []], {}, {}, {})
    assert set(compared["config"]) == {"launch.job_id", "launch.ranks"}

    asked = launch(slurm, tmp_path, "status", "run")
    assert asked.stdout == f"Slurm job {job}: COMPLETED, on n[1-2], restart 1\n"
    late = launch(slurm, tmp_path, "cancel", job)
    assert (late.returncode, late.stderr) == (2, f"lockstep: Slurm job {job} has ended already: {asked.stdout}")


def test_what_slurm_refuses_is_one_sentence(slurm: Cluster, tmp_path: Path) -> None:
    done = launch(slurm, tmp_path, "--partition", "nope", *TRAIN)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "lockstep: sbatch failed: invalid partition specified: nope; Batch job submission failed: Invalid partition "
        "name specified; `sinfo -s` lists the partitions\n"
    )
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    unknown = launch(slurm, tmp_path, "status", "4711")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("lockstep: Slurm knows no job 4711")


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
