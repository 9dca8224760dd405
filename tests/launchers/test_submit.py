"""What `lockstep launch` does with any launcher's jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kit.failures import gives

import lockstep
from lockstep.cli.main import main
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan, SweepOptions
from lockstep.launchers import BUILTIN, find_launcher
from lockstep.strategies.section import Section

ROOT = Path(__file__).parents[2]
TRAIN = ["train", "digits", "run.folder=r", "--ranks", 2]
CODES: dict[str, int | None] = {}
CALLS: list[tuple[str, str]] = []


class Options(Section, SweepOptions):
    """Options of a queue in memory."""

    nodes: int = 1
    """Nodes."""
    tag: tuple[str, ...] = ()
    """Tags."""
    requeue: bool = True
    """Queue again."""


class Queue(lockstep.extend.Launcher):
    options = Options

    def plan(self, command: JobCommand, options: Options) -> LaunchPlan:
        return LaunchPlan({command.folder / "typed": command.typed}, (command.words,), (f"{options.nodes} nodes",))

    def submit(self, plan: LaunchPlan) -> str:
        [(path, text)] = plan.files.items()
        path.parent.mkdir(parents=True)
        path.write_text(text)
        CODES[f"j{len(CODES)}"] = None
        return f"j{len(CODES) - 1}"

    def status(self, job: LaunchedJob) -> JobStatus:
        return JobStatus(f"{job.number}: {CODES[job.number]}", CODES[job.number])

    def follow(self, job: LaunchedJob) -> int:
        CODES[job.number] = CODES[job.number] or 0
        return CODES[job.number] or 0

    def cancel(self, job: LaunchedJob) -> None:
        CALLS.append(("cancel", job.number))


QUEUE = Queue()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.cli.launch.find_launcher", lambda where: QUEUE)
    CODES.clear()
    CALLS.clear()


def launch(*words: object) -> int:
    return main(["launch", "queue", *map(str, words)])


def test_a_job_is_submitted_asked_followed_and_canceled(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--nodes", 3, "--tag", "a b", "--no-requeue", *TRAIN) == 0
    assert gives(capsys.readouterr().err.replace("\n", " "), "3 nodes", "j0", "r/launch")
    typed = Path("r/launch/typed").read_text()
    assert typed == "lockstep launch queue --nodes 3 --tag 'a b' --no-requeue train digits run.folder=r --ranks 2"
    assert json.loads(Path("r/launch/job.json").read_text())["command"] == typed
    assert launch(*TRAIN) == 2
    assert "this run has a job already" in capsys.readouterr().err
    assert launch("cancel", "r") == 0
    assert CALLS == [("cancel", "j0")]
    CODES["j0"] = 75
    assert launch("follow", "r") == launch("follow", "j0") == 75


def test_a_sweep_is_one_job_of_all_runs() -> None:
    assert launch("--sweep", "optim.lr=0.1,0.01", "--sweep", "run.seed=1,2", *TRAIN) == 0
    assert launch("cancel", "r") == 0
    assert CALLS == [("cancel", "j0")]


@pytest.mark.parametrize("earlier", [None, {"launcher": "queue", "job": "j0"}])
def test_a_job_whose_identifier_is_known_is_remembered_before_it_is_submitted(
    earlier: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it can be canceled if the command is killed meanwhile."""
    record = Path("r/launch/job.json")
    CODES["j0"] = 0
    if earlier is not None:
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps(earlier))

    def refuse(plan: LaunchPlan) -> str:
        CODES["known"] = None
        assert launch("cancel", "r") == 0
        raise lockstep.RunFailed("refused")

    monkeypatch.setattr(Queue, "plan", lambda queue, *words: LaunchPlan({}, (), number="known"))
    monkeypatch.setattr(QUEUE, "submit", refuse)
    assert launch(*TRAIN) == 1
    assert CALLS == [("cancel", "known")]
    assert Path("r").exists() == (earlier is not None)
    assert earlier is None or json.loads(record.read_text()) == earlier


def test_an_unknown_place_lists_the_places(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.cli.launch.find_launcher", find_launcher)
    assert main(["launch", "slrum", *map(str, TRAIN)]) == 2
    assert gives(capsys.readouterr().err, "aws, docker", "slurm")


@pytest.mark.parametrize("where", sorted(BUILTIN))
def test_a_job_that_is_not_known_is_refused(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.cli.launch.find_launcher", find_launcher)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    other = "slurm" if where == "ssh" else "ssh"
    for folder, launcher, job in (
        ("runs/a", where, "its-own"),
        ("b", other, "another's"),
        ("runs/s/0", where, "swept"),
    ):
        Path(folder, "launch").mkdir(parents=True)
        Path(folder, "launch", "job.json").write_text(json.dumps({"launcher": launcher, "job": job}))
    Path("runs/damaged/launch").mkdir(parents=True)
    Path("runs/damaged/launch/job.json").write_text("{")
    Path("plain").mkdir()
    Path("file").touch()
    for verb in ("status", "follow", "cancel"):
        for text, message in {
            "no such/": "'no such/' is neither .* nor the folder of .*",
            "": "'' is neither .* nor the folder of .*",
            "another's": rf"another's is a job of {other} \(b\), not of {where}: lockstep launch {other} ",
            "plain": "no job was launched for plain; give the job's identifier or .*",
            "runs/damaged": "runs/damaged/launch/job.json is damaged; give the job's identifier",
        }.items():
            assert main(["launch", where, verb, text]) == 2
            assert re.match(f"lockstep: {message}", capsys.readouterr().err)
