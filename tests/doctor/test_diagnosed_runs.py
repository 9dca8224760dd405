"""`lockstep doctor RUN` states what happened in a run, with file and line, whatever its files are like."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.failures import fails, gives
from kit.recorded import BY_A_PERSON, GLOO_CLOSED, KILLED, PEER, record_end, recorded_run

from lockstep.core.errors import ConfigError
from lockstep.core.failure_kinds import FailureKind
from lockstep.doctor.known_failures import KNOWN, Standing
from lockstep.doctor.run import describe_run, diagnose_run, run_as_json
from lockstep.launch.ends_file import gist, read_ends
from lockstep.looking.listing import listed
from lockstep.looking.states import RunState, status_of
from lockstep.monitor.folder import RunFolder
from lockstep.report.explanation import explain
from lockstep.report.facts import large_figures
from lockstep.report.run_data import read_run


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    out_of_memory = "step 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"
    run = recorded_run(
        tmp_path, f"step 3\nstep 4\n{GLOO_CLOSED}\n", out_of_memory, metrics='{"step": 3, "loss": 1.0}\n'
    )
    diagnosis = diagnose_run(run)
    assert diagnosis.is_wrong
    assert diagnosis.state == "failed after step 3 of 10"
    assert [item.failure.name for item in diagnosis.seen] == [
        FailureKind.OUT_OF_MEMORY.title,
        FailureKind.PEER_FAILED.title,
    ]
    (line,) = diagnosis.seen[0].evidence
    assert (line.file, line.line, line.rank) == ("logs/rank-1.log", 2, 1)
    text = describe_run(diagnosis, 80)
    assert text.index(f"cause: {FailureKind.OUT_OF_MEMORY.title}") < text.index(
        f"consequence: {FailureKind.PEER_FAILED.title}"
    )
    assert "logs/rank-1.log:2: torch.OutOfMemoryError" in text
    assert (
        max(len(row) for row in text.splitlines() if not row.strip().startswith((str(tmp_path), "lockstep train")))
        <= 80
    )
    content = run_as_json(diagnosis)
    assert content["failures"][0]["evidence"][0]["line"] == 2


def test_a_rank_that_ended_silently_is_named(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, f"{GLOO_CLOSED}\n", "step 3\n", f"{GLOO_CLOSED}\n")
    diagnosis = diagnose_run(run)
    assert diagnosis.is_wrong
    assert any(gives(note, "rank 1", "killed", "dmesg") for note in diagnosis.notes)


def test_a_finished_run_is_fine_whatever_it_survived(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, f"{GLOO_CLOSED}\n", metrics='{"step": 10, "loss": 1.0}\n')
    (run / "summary.json").write_text("{}")
    diagnosis = diagnose_run(run)
    assert not diagnosis.is_wrong
    assert diagnosis.state == "finished (step 10 of 10)"


def test_a_running_run_is_not_wrong(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    (run.path / "config.yaml").write_text("run: {steps: 10}\n")
    assert diagnose_run(run.path).state.startswith("running")
    run.release()
    assert diagnose_run(run.path).state.startswith("ended before ")


def test_discarded_updates_and_failed_saves_are_remarks(tmp_path: Path) -> None:
    metrics = '{"step": 1, "kept": true, "verdict": "kept"}\n{"step": 2, "kept": false, "verdict": "non_finite"}\n'
    events = '{"saved": 2, "step": 2, "bytes": 0, "seconds": 1, "lost_seconds": 0, "failure": "no space"}\n'
    diagnosis = diagnose_run(recorded_run(tmp_path, "fine\n", metrics=metrics, events=events))
    assert not diagnosis.is_wrong
    assert [(item.failure.name, item.failure.standing) for item in diagnosis.seen] == [
        ("updates discarded", Standing.REMARK),
        ("save failed", Standing.REMARK),
    ]
    assert diagnosis.seen[0].evidence[0].line == 2


def test_damaged_and_hostile_files_are_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.doctor import evidence as module

    monkeypatch.setattr(module, "_MOST_READ", 1000)
    bad = "\x1b]0;evil\x07 CUDA out of memory \x1b[2J"
    run = recorded_run(tmp_path, "x\n" * 5000 + bad, metrics="{{{\n\x00\n", events="[1]\n")
    (run / "logs" / "rank-1.log").write_bytes(os.urandom(5000))
    os.mkfifo(tmp_path / "pipe")
    diagnosis = diagnose_run(run)
    (item,) = (item for item in diagnosis.seen if item.failure.name == "out of memory")
    assert item.evidence[0].line == 5001  # lines before the part that is read count, too
    assert "\x1b" not in describe_run(diagnosis, 80)
    (run / "logs" / "rank-2.log").symlink_to("/etc/passwd")
    with fails(ConfigError, run / "logs" / "rank-2.log"):
        diagnose_run(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with fails(ConfigError, tmp_path):
        diagnose_run(tmp_path)


# --- how launches ended -------------------------------------------------------------------------------------------


def test_the_recorded_end_names_the_first_rank(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, f"{GLOO_CLOSED}\n", "step 3\n", metrics='{"step": 3, "loss": 1.0}\n')
    record_end(run)
    diagnosis = diagnose_run(run)
    assert gives(diagnosis.state, "failed", "step 3", 10, "rank 1 on host b", "SIGKILL", BY_A_PERSON)
    assert [item.failure.name for item in diagnosis.seen] == [FailureKind.KILLED.title, FailureKind.PEER_FAILED.title]
    text = describe_run(diagnosis, 80)
    assert text.index("rank 1 on b") < text.index("rank 0 on a")
    assert [rank["rank"] for rank in run_as_json(diagnosis)["ranks"]] == [1, 0]


def test_survived_failures_are_stated(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "step 9\n", metrics='{"step": 9, "loss": 1.0}\n')
    hang = {"rank": 1, "host": "b", "kind": "hung", "text": "rank 1 hangs in its forward", "time": 90.0}
    record_end(run, text="batch.global_size: is 0", kind="config", cause=None, ranks=[], step=None)
    record_end(run, text="rank 1 hangs in its forward", kind="hung", ranks=[PEER, hang])
    record_end(run, kind="paused", text="stopped by SIGTERM", cause=None, ranks=[])
    record_end(run, step=6)
    rolled = {**KILLED, "kind": "rolled_back"}
    record_end(run, step=8, text="step 8: loss nan", kind="rolled_back", ranks=[PEER, rolled])
    listed = [f"rank 1 on host b was killed by SIGKILL: {BY_A_PERSON} (after step 6)"]
    listed.insert(0, "rank 1 hangs in its forward (after step 3)")
    (note,) = (note for note in diagnose_run(run).notes if "survived" in note)
    assert gives(note, 2, *listed)
    record_end(run, kind="done", text="", cause=None, ranks=[], step=9)
    (run / "summary.json").write_text("{}")
    (note,) = (note for note in diagnose_run(run).notes if "survived" in note)
    assert gives(note, 2, *listed)


@pytest.mark.parametrize("kind", ["paused", "stopped"])
def test_a_stopped_run_did_not_fail_whatever_earlier_launches_did(kind: str, tmp_path: Path) -> None:
    earlier = "torch.OutOfMemoryError: CUDA out of memory.\n"
    run = recorded_run(tmp_path, earlier + "stopped by SIGTERM\n", metrics='{"step": 3, "loss": 1.0}\n')
    record_end(run, attempt="an earlier one", logs={"0": [0, len(earlier)]})
    record_end(run, kind=kind, text="stopped by SIGINT", ranks=[], cause=None, logs={"0": [len(earlier), 99]})
    diagnosis = diagnose_run(run)
    assert (diagnosis.is_wrong, diagnosis.seen) == (False, ())
    assert gives(diagnosis.state, "stopped", "step 3", 10, "SIGINT")


def test_a_refused_start_is_told_from_a_failure(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "")
    record_end(run, kind="config", text="batch.global_size: 30 isn't divisible by 4", ranks=[], cause=None)
    assert gives(diagnose_run(run).state, "refused", "batch.global_size: 30")


def test_a_refused_resume_keeps_the_failure_before_it(tmp_path: Path) -> None:
    reason = "the checkpoint of step 3 is of a run with other data, model or seed:\n  a fingerprint: 1 then, 2 now\n"
    reason = gist(f"{reason}--accept-changes resumes from it all the same")
    assert reason.count("\n") == 0
    assert gives(reason, "a fingerprint: 1", 2, "--accept-changes")
    run = recorded_run(tmp_path, "", metrics='{"step": 3, "loss": 1.0}\n')
    record_end(run, kind="sample", text="rank 0: sample 17 can't be used: None", cause=0)
    record_end(run, kind="other_data", text=reason, ranks=[], cause=0)
    record_end(run, kind="other_data", text=reason, ranks=[], cause=0)
    diagnosis, text = diagnose_run(run), describe_run(diagnose_run(run), None)
    assert gives(diagnosis.state, "refused", "step 3", 10, reason)
    assert diagnosis.resume.endswith(" --accept-changes")
    assert any(gives(note, "rank 0", "sample 17") for note in diagnosis.notes)
    assert not any("survived" in note for note in diagnosis.notes)
    assert text.index(f"cause: {FailureKind.OTHER_DATA.title}") < text.index(f"also seen: {FailureKind.SAMPLE.title}")


def test_a_launch_without_a_record_was_killed_and_only_its_own_log_is_read(tmp_path: Path) -> None:
    earlier = "torch.OutOfMemoryError: CUDA out of memory.\n"
    run = recorded_run(tmp_path, f"{earlier}DataLoader worker (pid 3) exited unexpectedly\n")
    record_end(run, attempt="an earlier one", logs={"0": [0, len(earlier)]})
    diagnosis = diagnose_run(run)
    assert diagnosis.is_wrong
    assert gives(diagnosis.state, "launcher", "killed")
    assert [item.failure.name for item in diagnosis.seen] == ["data worker died"]
    assert diagnosis.seen[0].evidence[0].line == 2


@pytest.mark.parametrize("metrics", ["", '{"step": 1, "loss": 1.0}\n'])
def test_the_step_of_a_killed_run_is_that_of_its_newest_checkpoint(metrics: str, tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "", metrics=metrics)
    record_end(run, step=1)
    (run / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert gives(diagnose_run(run).state, "failed", "step 8", 10)
    assert listed(run).step == 8
    assert "8" in explain(run).sentences[0]
    (run / "attempts.jsonl").write_text('{"attempt": 2, "launched": 1.0, "began": 2.0, "step": 9, "seconds": 0.1}\n')
    assert (listed(run).step, read_run(run).reached) == (9, 9)


def test_hosts_with_other_variables_are_named(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "")
    hosts = [{"host": "a", "packages": {"torch": "2.13.0"}, "variables": {"RANK": "0", "NCCL_IB_DISABLE": "1"}},
             {"host": "b", "packages": {"torch": "2.12.0"}, "variables": {"RANK": "1"}}]  # fmt: skip
    for node, environment in enumerate(hosts):
        record_end(run, node, environment=environment)
    (note,) = (note for note in diagnose_run(run).notes if "differs" in note)
    assert gives(note, "a", "b", "torch 2.13.0 -> 2.12.0", "NCCL_IB_DISABLE=1 -> none")


def test_damaged_and_hostile_records_are_left_out(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "")
    record_end(run, text="\x1b]0;evil\x07 killed", ranks=[{**KILLED, "host": "\x1b[2J"}])
    with (run / "logs" / "ends.jsonl").open("a") as file:
        file.write('{"ranks": 3}\n[]\n{"attempt": "", "ranks": [{"rank": 1e999}]}\n' + "[" * 5000 + "\nnull\n{")
    os.mkdir(run / "logs" / "ends-1.jsonl")
    assert len(read_ends(run / "logs")) == 1
    assert "\x1b" not in describe_run(diagnose_run(run), 80)


def test_a_rank_that_exits_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM.replace("FAULT", "if 'NCCL_ALGO' in os.environ: os._exit(9)"))
    (tmp_path / "run.json").write_text(json.dumps(CONFIG))
    assert run_lockstep("train", "run.json", "--ranks", 2, cwd=tmp_path).returncode == 0
    healthy = run_lockstep("doctor", "run", cwd=tmp_path)
    assert (healthy.returncode, healthy.stdout) == (0, "run: finished (step 5 of 5)\n")
    failed = run_lockstep("train", "run", "--ranks", 2, "run.steps=9", cwd=tmp_path, NCCL_ALGO="Ring")
    assert failed.returncode == 1, failed.stderr
    explained = run_lockstep("doctor", "run", "--json", cwd=tmp_path)
    assert explained.returncode == 3
    content = json.loads(explained.stdout)
    assert gives(content["state"], "rank 1", "exit code 9")


@pytest.mark.parametrize("kind", ["worker_exited", "sample", "exited", "crashed", "killed"])
def test_the_remedy_names_the_sample_that_ended_the_run(tmp_path: Path, kind: str) -> None:
    run = recorded_run(
        tmp_path, "Traceback (most recent call last):\nTypeError: object of type 'NoneType' has no len()\n"
    )
    exited = {**KILLED, "rank": 0, "kind": kind, "text": "a data worker died", "samples": [17]}
    record_end(run, kind=kind, text="rank 0: a data worker died", cause=0, ranks=[exited])
    remedy = run_as_json(diagnose_run(run))["failures"][0]["remedy"]
    assert f"lockstep train {run} data.leave_out='[[17, 17]]'" in remedy
    assert "data.bad_samples='{policy: skip}'" in remedy


# --- losses ---------------------------------------------------------------------------------------------------------


def _losses(folder: Path, *losses: float | None) -> str:
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    run = recorded_run(folder, metrics="\n".join(lines) + "\n")
    (run / "summary.json").write_text("{}")
    diagnosis = diagnose_run(run)
    text = describe_run(diagnosis, 1000).partition("\n\n")[2].strip()
    return f"wrong: {text}" if diagnosis.is_wrong else text


def test_discarded_updates_count_only_if_they_are_many_in_a_row_at_the_end(tmp_path: Path) -> None:
    for discarded, is_wrong in (([40], False), ([10, 20, 30, 38, 39, 40], False), ([*range(15, 41)], True)):
        run = recorded_run(tmp_path / f"{len(discarded)}")
        lines = [
            {"step": step, "loss": None if step in discarded else 3.0 - step / 40, "kept": step not in discarded}
            for step in range(1, 41)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "summary.json").write_text("{}")
        diagnosis, status, first = diagnose_run(run), status_of(run), explain(run).sentences[0]
        figures = {name: value for name, value, _ in large_figures(read_run(run))}
        assert diagnosis.is_wrong is is_wrong
        assert status.state is (RunState.DIVERGED if is_wrong else RunState.DONE)
        assert listed(run).loss is not None
        assert ("nan" in first) is is_wrong
        assert (figures["Training loss"] == "not finite") is is_wrong
        if is_wrong:
            assert any(gives(note, "step 15") for note in diagnosis.notes)


def test_a_loss_that_diverged_is_named(tmp_path: Path) -> None:
    falls = [4.0 / (1 + step / 10) for step in range(50)]
    for number, (losses, text) in enumerate(
        [
            (falls, ""),
            ([*falls, *reversed(falls)], ""),
            (falls[:5], ""),
            ([*falls, *(0.7 * 1.1**step for step in range(50))], "wrong: The loss has diverged: it was 0.7"),
            ([*falls, None, None], "wrong: The loss is not finite from step 51 on."),
            ([None], "wrong: The loss is not finite from step 1 on."),
            ([*falls[:20], None, *falls[20:]], ""),
            (
                [2.3 + step % 3 / 10 for step in range(60)],
                "The loss did not improve: 2.4 at the start, 2.4 at the end.",
            ),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        shown = _losses(tmp_path / str(number), *losses)
        assert shown.startswith(text), (number, shown)
        assert bool(shown) == bool(text) or number == 1, (number, shown)


PROGRAM = """
import os, signal, time, torch

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {"x": torch.randn(4), "labels": index % 2}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 2), 0
    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > 2:
            FAULT
        return self.layer(x)
"""


CONFIG = {
    "model": {"kind": "custom", "target": "mine.py:Net"},
    "objective": {"kind": "classification"},
    "data": {"train": {"kind": "custom", "target": "mine.py:Points"}},
    "batch": {"global_size": 8},
    "launch": {"device": "cpu"},
    "monitor": {"tensorboard": False},
    "run": {"steps": 5, "folder": "run"},
    "recovery": {"restarts": 0},
}


@pytest.mark.parametrize(
    ("fault", "cause", "text"),
    [
        ("raise ValueError('the sensor has 3 columns')", "cause: an exception", "the sensor has 3 columns"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "cause: a rank was killed",
            "failed after step 2 of 5: rank 1 was kil",
        ),
        (
            "os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)",
            "its launcher was killed",
            "its launcher was killed, its machine stopped",
        ),
    ],
)
def test_a_run_that_really_failed_is_explained(fault: str, cause: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM.replace("FAULT", fault))
    (tmp_path / "run.json").write_text(json.dumps(CONFIG))
    done = run_lockstep("train", "run.json", "--ranks", 2, cwd=tmp_path)
    assert done.returncode in (1, -signal.SIGKILL)
    explained = run_lockstep("doctor", "run", cwd=tmp_path)
    assert explained.returncode == 3, done.stderr
    assert cause in explained.stdout
    assert text in explained.stdout


def test_the_command_refuses_two_questions_at_once(tmp_path: Path) -> None:
    done = run_lockstep("doctor", "--known", "--ranks", 2, cwd=tmp_path)
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
    assert run_lockstep("doctor", "--known", cwd=tmp_path).stdout.startswith(f"{len(KNOWN)} known failures")
