"""`lockstep ls`: the state of each run from the files that are there, quickly, whatever they are like."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.reports import FACTS, report

from lockstep.cli.main import main
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.progress import Progress
from lockstep.launch.ends import End
from lockstep.launch.ends_file import append_ends
from lockstep.launch.outcome import LaunchResult
from lockstep.looking.listing import describe, list_runs, runs_in
from lockstep.looking.states import RunState, status_of
from lockstep.monitor.attempts import Attempt, attempts_text
from lockstep.monitor.events import EventLog, summarize
from lockstep.monitor.folder import ATTEMPTS, CONFIG, ENVIRONMENT, LOGS, METRICS, SUMMARY, RunFolder, is_finished


def make_run(path: Path, steps: int = 30, *, host: str = "a", **changes: object) -> RunFolder:
    """Start a run that writes `steps` lines, and holds its lock."""
    run = RunFolder.create(path)
    run.write(CONFIG, "description: learns\n")
    run.write(ATTEMPTS, attempts_text([Attempt(time.time(), time.time(), facts={"steps": 40})]))
    run.write(
        ENVIRONMENT, {"host": host, "created": "2026-11-21T09:30:00+0000", "variables": {"LOCKSTEP_LAUNCHER": "1"}}
    )
    log = EventLog(run.path / METRICS, every=1)
    for step in range(1, steps + 1):
        log.see(report(step, **changes))
    log.finish(None)
    return run


def live(run: Path, age: float = 0.0, hosts: int = 1) -> None:
    ranks = [{"rank": rank, "host": f"h{rank}"} for rank in range(hosts)]
    (run / "live.json").write_text(json.dumps({"time": time.time() - age, "step": 30, "ranks": ranks}))
    os.utime(run / "live.json", (time.time() - age,) * 2)


def ended(run: RunFolder, text: str, kind: FailureKind) -> None:
    append_ends(run.path / LOGS, 0, [End(kind, text, time=time.monotonic())], ["a"], LaunchResult(kind, text), {0: 0})
    run.release()


def finished(run: RunFolder) -> None:
    run.write(SUMMARY, summarize(FACTS, Progress(40, 2560, 2560), report(40), [], 3.25))
    run.release()


def foreign(run: RunFolder) -> None:
    """Leave a run as another host that holds its lock would, on a file system that doesn't show it."""
    run.release()
    (run.path / "run.lock").write_text("process 7 on elsewhere, since 2026-11-21 09:30:00\n")


STATES: dict[str, tuple[Callable[[RunFolder], object], dict[str, object], str, str]] = {
    "lock held": (lambda run: None, {}, "running", ""),
    "lock held, live": (lambda run: live(run.path), {}, "running", ""),
    "lock held, silent": (lambda run: live(run.path, 90), {}, "running", "no sign of life for 1 min 30 s"),
    "elsewhere": (lambda run: (foreign(run), live(run.path)), {}, "running", ""),
    "elsewhere, long ago": (lambda run: (foreign(run), live(run.path, 90)), {}, "failed", "it left no record"),
    "killed just now": (lambda run: (run.release(), live(run.path)), {}, "running", ""),  # this process lives
    "launcher killed": (lambda run: run.release(), {}, "failed", "it left no record"),
    "finished": (finished, {}, "done", ""),
    "finished, not finite": (finished, {"loss": float("nan")}, "diverged", "The loss is not finite from step 1 on"),
    "paused": (
        lambda run: ended(run, "stopped by SIGTERM", FailureKind.PAUSED),
        {},
        "stopped",
        "stopped by SIGTERM",
    ),
    "interrupted": (lambda run: ended(run, "stopped", FailureKind.INTERRUPTED), {}, "stopped", "stopped"),
    "exit code 75": (lambda run: ended(run, "", FailureKind.EXITED), {}, "failed", "a rank exited"),
    "failed": (
        lambda run: ended(run, "rank 0: ValueError: x", FailureKind.EXCEPTION),
        {},
        "failed",
        "rank 0: ValueEr",
    ),
    "failed, not finite": (
        lambda run: ended(run, "20 updates in a row were discarded", FailureKind.FAILED),
        {"loss": float("inf")},
        "diverged",
        "The loss is not finite",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_comes_from_the_files_that_are_there(tmp_path: Path, name: str) -> None:
    happen, changes, state, note = STATES[name]
    run = make_run(tmp_path / "run", **changes)
    happen(run)
    status = status_of(run.path)
    assert status.state.value == state
    assert status.note.startswith(note) if note else not status.note
    run.release()


def test_what_is_known_of_a_run_that_left_no_record_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    run.release()
    assert status_of(run.path).note == ("it left no record: it was killed, its machine stopped, or its disk was full")
    full = os.statvfs_result((4096, 4096, 10**6, 0, 0, 10**6, 10**5, 10**5, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    status = status_of(run.path)
    assert status.note == "it left no record: its disk is full (this disk has 0 B free now)"
    assert status.sentence == f"It failed: {status.note}."


def test_a_run_that_ended_early_has_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    finished(run)
    summary = json.loads((run.path / "summary.json").read_text())
    (run.path / "summary.json").write_text(json.dumps({**summary, "stopped_early": "loss has not improved"}))
    status = status_of(run.path)
    assert (status.state, status.note) == (RunState.DONE, "ended early: loss has not improved")
    assert status.sentence == "It ended early: loss has not improved."


def test_a_run_without_an_update_is_starting(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    assert status_of(run.path).state is RunState.STARTING
    live(run.path)
    assert status_of(run.path).state is RunState.RUNNING
    run.release()


def test_a_killed_run_is_not_running_although_its_live_file_is_fresh(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    ended_process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    lock = (run.path / "run.lock").read_text().replace(str(os.getpid()), ended_process.stdout.decode().strip())
    run.release()
    (run.path / "run.lock").write_text(lock)
    live(run.path)
    assert status_of(run.path).state is RunState.FAILED


def test_a_loss_that_grows_in_a_long_file_is_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    lines = ({"step": step, "note": "x" * 300, "loss": 0.1 if step < 1500 else 80.0} for step in range(1, 2001))
    (run.path / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ended(run, "stopped", FailureKind.PAUSED)
    assert status_of(run.path).state is RunState.DIVERGED


def test_the_list_has_what_the_files_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = make_run(tmp_path / "runs" / "first")
    live(first.path, hosts=3)
    finished(make_run(tmp_path / "runs" / "sweep" / "second", host="b"))
    row = next(row for row in list_runs([Path(), Path("runs")]) if row.run == "runs/first")
    assert (row.step, row.steps, row.share, row.loss) == (30, 40, 0.75, 1.0 + 1.0 / 30)
    assert (row.speed, row.unit, row.host, row.hosts) == (pytest.approx(640 * 256), "tokens", "a", 3)
    assert row.started == 1795253400.0
    text = describe(list_runs([Path("runs")]), None, now=1795253400.0 + 3600)
    assert [line.split()[:3] for line in text.splitlines()] == [
        ["state", "run", "step"],
        ["running", "runs/first", "30/40"],
        ["done", "runs/sweep/second", "40/40"],
    ]
    assert text.splitlines()[1].endswith("30/40  1.033  164k tokens/s  1 h 00 min  a +2")
    first.release()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_table_fits_its_terminal(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / ("long" * 20))
    ended(run, "rank 0: ValueError: " + "x" * 200 + "\x1b[2J", FailureKind.EXCEPTION)
    lines = describe(list_runs([tmp_path]), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert lines[2].endswith("…")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_a_narrow_terminal_lacks_columns_and_cuts_no_number(tmp_path: Path, width: int) -> None:
    make_run(tmp_path / ("long-name-" * 10 + "end")).release()
    rows = list_runs([tmp_path])
    head, whole = (line.split() for line in describe(rows, None).splitlines()[:2])
    shown_head, shown = (line.split() for line in describe(rows, width).splitlines()[:2])
    assert shown_head == head[: len(shown_head)]
    assert set(shown) - {shown[1]} <= set(whole)
    assert shown[1].endswith("end")
    assert ("host" in shown_head) == (width >= 80)


def test_damaged_foreign_and_hostile_folders_are_listed_or_left_out(tmp_path: Path) -> None:
    damaged = make_run(tmp_path / "damaged")
    damaged.release()
    for name in ("metrics.jsonl", "environment.json", "live.json", "config.yaml", "logs/ends.jsonl"):
        (damaged.path / name).write_bytes(os.urandom(3000))
    odd = make_run(tmp_path / "odd")
    odd.release()
    (odd.path / "environment.json").write_text('{"host": ["x"], "created": 7, "variables": []}')
    (odd.path / "live.json").write_text('{"time": "now", "step": [1], "ranks": {"a": 1}}')
    (odd.path / METRICS).write_text('{"step": "x", "loss": true}\n[' * 5000)
    piped = make_run(tmp_path / "piped")
    piped.release()
    for name in ("metrics.jsonl", "environment.json"):
        (piped.path / name).unlink()
        os.mkfifo(piped.path / name)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "metrics.jsonl").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "text.txt").write_text("")
    rows = {Path(row.run).name: row for row in list_runs([tmp_path])}
    assert sorted(rows) == ["damaged", "odd", "piped"]
    assert all(row.loss is None for row in rows.values())
    assert describe(list(rows.values()), 80)


def test_a_folder_that_refuses_to_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "mine").release()
    (tmp_path / "other").mkdir()
    scan = os.scandir

    def refused(path: object) -> object:
        if str(path).endswith("other"):
            raise PermissionError(13, "Permission denied")
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refused)
    assert [Path(row.run).name for row in list_runs([tmp_path])] == ["mine"]


def test_the_verb_lists_runs_and_refuses_what_is_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    run.release()
    before = sorted(tmp_path.rglob("*"))
    assert main(["ls", str(tmp_path), "--json"]) == 0
    captured = capfd.readouterr()
    (row,) = json.loads(captured.out)
    assert (row["state"], row["step"], row["steps"], row["host"]) == ("failed", 30, 40, "a")
    assert str(run.path) in captured.err
    assert sorted(tmp_path.rglob("*")) == before
    assert not is_finished(run.path)
    assert main(["ls", str(tmp_path / "no")]) == 2
    assert "there is no folder" in capfd.readouterr().err


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "looking.md").read_text()
    lines = re.findall(r"^lockstep (ls.*)$", page, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.replace("/shared", str(tmp_path)))
        for word in words[1:]:
            if not word.startswith("-"):
                make_run(Path(word, "run")).release()
        assert main(words) == 0


def test_500_runs_are_listed_without_torch_in_a_few_calls_each(tmp_path: Path) -> None:
    first = make_run(tmp_path / "0", steps=200)
    ended(first, "rank 0: ValueError", FailureKind.EXCEPTION)
    for number in range(1, 500):
        other = tmp_path / str(number)
        (other / "logs").mkdir(parents=True)
        for name in ("config.yaml", "environment.json", "metrics.jsonl", "run.lock", "logs/ends.jsonl"):
            os.link(first.path / name, other / name)
    code = (
        "import itertools, sys; from lockstep.cli.main import main; calls = itertools.count(); "
        "sys.setprofile(lambda frame, event, argument: event == 'call' and next(calls)); "
        f"main(['ls', {str(tmp_path)!r}]); sys.setprofile(None); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(next(calls))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *rows, calls = done.stdout.splitlines()
    assert len(rows) == 1 + 2 * 500
    assert int(calls) < 500 * 2000, calls


def test_runs_are_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    names = ["lr-0.1", "seed", "seed-1", "seed-2", "seed-10", "seed-10b", "step-0", "x" + "9" * 40, "x²"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
    assert [run.name for run in runs_in(tmp_path)] == names
