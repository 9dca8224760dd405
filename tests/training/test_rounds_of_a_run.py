"""What the launcher of a run knows and keeps between the rounds of its ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from kit import small
from kit.failures import gives

from lockstep.config.loading import validate
from lockstep.core.failure_kinds import FailureKind
from lockstep.launch.ends import End
from lockstep.launch.memory_folder import MemoryFolder, left_by, note_attempt
from lockstep.launch.outcome import LaunchResult
from lockstep.launch.supervision import Supervisor
from lockstep.monitor.folder import ENVIRONMENT, RunFolder
from lockstep.resuming.resuming import Resume
from lockstep.training import start_run
from lockstep.training.job import Job
from lockstep.training.start_run import SmallerBatches

KILLED = [End(FailureKind.KILLED, "was killed by SIGKILL", 0.0)]


def supervisor_of(folder: Path, resume: Resume) -> Supervisor:
    """That of a start in the folder of a run that was at step 787."""
    (folder / "metrics.jsonl").write_text('{"step": 787}\n')
    (folder / "attempts.jsonl").write_text("an earlier attempt\n")
    config = validate(small.config(run={"folder": str(folder), "steps": 900}, recovery={"restarts": 1})).config
    return start_run._supervisor(SmallerBatches(Job(config, "test", resume=resume), folder, 2), RunFolder(folder))


@pytest.mark.parametrize("resume", [Resume(fresh=True), Resume(step=4)], ids=["--fresh", "--from"])
def test_a_run_that_starts_over_has_not_got_as_far_as_the_run_before(
    tmp_path: Path, resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = supervisor_of(tmp_path, resume)
    assert supervisor.next_entry(KILLED, LaunchResult(FailureKind.KILLED, "killed in setup")) is not None
    assert gives(capsys.readouterr().err, "step 0")
    (tmp_path / "metrics.jsonl").write_text('{"step": 79}\n')
    (tmp_path / "attempts.jsonl").write_text("this attempt\n")
    assert supervisor.next_entry(KILLED, LaunchResult(FailureKind.KILLED, "killed")) is not None
    assert gives(capsys.readouterr().err, "step 79")
    assert supervisor.next_entry(KILLED, LaunchResult(FailureKind.KILLED, "killed again, there")) is None


def test_a_run_that_resumes_is_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        supervisor_of(tmp_path, Resume()).next_entry(KILLED, LaunchResult(FailureKind.KILLED, "killed in setup"))
        is not None
    )
    assert gives(capsys.readouterr().err, "step 787")


@pytest.mark.parametrize("holds", [True, False], ids=["with a snapshot", "without"])
def test_a_launch_that_raises_leaves_the_snapshots_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """For the next start of the run: they are saved nowhere else."""
    folder, memories = tmp_path / "run", []

    def begin_and_fail(entry: partial[int], *arguments: object, **options: object) -> LaunchResult:
        job = entry.args[0]
        memories.append(job.memory)
        if holds:
            (job.memory / "checkpoints" / "step-00000416").mkdir(parents=True)
            note_attempt(job.memory, folder)
        raise FileNotFoundError("a folder for temporary files")

    monkeypatch.setattr(start_run, "launch", begin_and_fail)
    config = validate(small.config(run={"folder": str(folder), "steps": 900})).config
    with pytest.raises(FileNotFoundError):
        start_run.launch_job(Job(config, "test"), 2)
    assert [memory.exists() for memory in memories] == [holds]
    assert (left_by(folder) is not None) is holds
    again = MemoryFolder.make(folder)
    assert again is not None
    again.remove()


@pytest.mark.parametrize("holder", ["process 1 on another-host, since 2026-11-27 08:00:00\n", "", None])
def test_ranks_do_not_start_again_in_the_folder_of_another_run(tmp_path: Path, holder: str | None) -> None:
    """Nor where it was deleted (no holder). One of this launcher's own attempts may have written another id there."""
    folder = RunFolder.create(tmp_path / "run")
    folder.write(ENVIRONMENT, {"run": "b" * 32})
    if holder is not None:
        (folder.path / "run.lock").unlink()
    if holder:
        (folder.path / "run.lock").write_text(holder)
    config = validate(small.config(run={"folder": str(folder.path), "steps": 900}, recovery={"restarts": 2})).config
    supervisor = start_run._supervisor(SmallerBatches(Job(config, "test"), folder.path, 2), folder)
    again = supervisor.next_entry(KILLED, LaunchResult(FailureKind.KILLED, "killed"))
    assert (again is None) is (holder is not None)
    text = supervisor.concluded(LaunchResult(FailureKind.KILLED, "killed")).text
    assert gives(text, folder.path, "another run") is (again is None)
    folder.release()
