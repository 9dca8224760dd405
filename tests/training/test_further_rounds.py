"""What the launcher of a run knows and keeps between the rounds of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import small

from lockstep.config.loading import validate
from lockstep.launch.ends import End, EndKind
from lockstep.launch.outcome import LaunchResult
from lockstep.launch.supervision import Supervisor
from lockstep.training.job import Job
from lockstep.training.resuming import Resume
from lockstep.training.smaller_batches import SmallerBatches
from lockstep.training.start_run import _supervisor

KILLED = [End(EndKind.KILLED, 1, "was killed by SIGKILL", 0.0)]


def supervisor_of(folder: Path, resume: Resume) -> Supervisor:
    """That of a start in the folder of a run that was at step 787."""
    (folder / "metrics.jsonl").write_text('{"step": 787}\n')
    (folder / "attempts.jsonl").write_text("an earlier attempt\n")
    config = validate(small.config(run={"folder": str(folder), "steps": 900}, recovery={"restarts": 1})).config
    return _supervisor(SmallerBatches(Job(config, "test", resume=resume), folder, 2))


@pytest.mark.parametrize("resume", [Resume(fresh=True), Resume(step=4)], ids=["--fresh", "--from"])
def test_a_run_that_starts_over_has_not_got_as_far_as_the_run_before(
    tmp_path: Path, resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = supervisor_of(tmp_path, resume)
    assert supervisor.next_entry(KILLED, LaunchResult(1, "killed in setup")) is not None
    assert "the run was at step 0 or later" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 79}\n')
    (tmp_path / "attempts.jsonl").write_text("this attempt\n")
    assert supervisor.next_entry(KILLED, LaunchResult(1, "killed")) is not None
    assert "the run was at step 79 or later" in capsys.readouterr().err
    assert supervisor.next_entry(KILLED, LaunchResult(1, "killed again, there")) is None


def test_a_run_that_resumes_is_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervisor_of(tmp_path, Resume()).next_entry(KILLED, LaunchResult(1, "killed in setup")) is not None
    assert "the run was at step 787 or later" in capsys.readouterr().err
