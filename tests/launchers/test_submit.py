"""`lockstep.submit`: what `lockstep launch` does, from Python."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.launchers.registry import BUILTIN, find_launcher
from lockstep.strategies.section import Section

ROOT = Path(__file__).parents[2]
TRAIN = ["train", "digits", "run.folder=r", "--ranks", 2]
CODES: dict[str, int | None] = {}
CALLS: list[tuple[str, str]] = []


class Options(Section):
    """Options of a queue in memory."""

    nodes: int = 1
    """Nodes."""
    tag: tuple[str, ...] = ()
    """Tags."""
    requeue: bool = True
    """Queue again."""


class Queue(lockstep.Launcher):
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
    monkeypatch.setattr("lockstep.cli.launch_api.find_launcher", lambda where: QUEUE)
    CODES.clear()
    CALLS.clear()


def test_a_job_is_submitted_asked_followed_and_canceled(capsys: pytest.CaptureFixture[str]) -> None:
    job = lockstep.submit("queue", TRAIN, nodes=3, tag=["a b"], requeue=False)
    assert capsys.readouterr().err == "note: 3 nodes\n"
    typed = Path("r/launch/typed").read_text()
    assert typed == "lockstep launch queue --nodes=3 '--tag=a b' --no-requeue train digits run.folder=r --ranks 2"
    assert json.loads(Path("r/launch/job.json").read_text())["command"] == typed
    assert (job.number, job.folder, job.status()) == ("j0", Path.cwd() / "r", JobStatus("j0: None", None))
    with pytest.raises(lockstep.ConfigError, match="this run has a job already"):
        lockstep.submit("queue", TRAIN)
    lockstep.find_job("queue", "r").cancel()
    assert CALLS == [("cancel", "j0")]
    CODES["j0"] = 75
    assert job.follow() == 75
    assert lockstep.find_job("queue", "j0").status().code == 75


def test_a_sweep_is_a_job_for_each_run() -> None:
    job = lockstep.submit("queue", TRAIN, sweep={"optim.lr": [0.1, 0.01], "run.seed": (1, 2)})
    assert [each.number for each in job.jobs] == ["j0", "j1", "j2", "j3"]
    assert [each.folder for each in job.jobs] == [Path.cwd() / "r" / str(run) / "launch" for run in range(4)]
    CODES.update(j0=0, j1=2, j2=0)
    assert job.status().code is None, "one has not ended"
    job.cancel()
    assert CALLS == [("cancel", "j3")]
    assert lockstep.find_job("queue", Path("r")).follow() == 2
    assert job.status().code == 2


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
        lockstep.find_job("queue", "r").cancel()
        raise lockstep.RunFailed("refused")

    monkeypatch.setattr(Queue, "plan", lambda queue, *words: LaunchPlan({}, (), number="known"))
    monkeypatch.setattr(QUEUE, "submit", refuse)
    with pytest.raises(lockstep.RunFailed, match="refused"):
        lockstep.submit("queue", TRAIN)
    assert CALLS == [("cancel", "known")]
    assert (json.loads(record.read_text()) if Path("r").exists() else None) == earlier


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (TRAIN, {"node": 2}, "node: there is no such option of queue; did you mean nodes?"),
        *(
            (TRAIN, {"nodes": bad}, "nodes: .* is not a whole number")
            for bad in ("two", "2", None, True, 2.0, b"2", [2])
        ),
        *(
            (TRAIN, {"tag": bad}, r"tag: .* is not a list of texts; write \[")
            for bad in ("a", 5, None, [None], [["a"]])
        ),
        *((TRAIN, {"requeue": bad}, "requeue: .* is not true or false") for bad in ("yes", 1, None)),
        *((TRAIN, {"sweep": bad}, "sweep: .* is not a mapping of keys to lists") for bad in ([], "a=1,2", 5, ["a"])),
        *((TRAIN, {"sweep": {bad: [1]}}, "sweep: .* is not a key of the config") for bad in (5, "", "a=b", None)),
        *(
            (TRAIN, {"sweep": {"optim.lr": bad}}, "optim.lr: .* is not a list of values without commas")
            for bad in (5, None, [], [[1, 2]], {1, 2}, b"ab", {"a": 1}, ["1,2"], [""], [b"1"])
        ),
        *((bad, {}, "command: .* is not a list of words") for bad in ("train digits", None, 5, {}, b"train", set())),
        *(
            ([*TRAIN, bad], {}, "command: .*: a word is a text, a number or a path")
            for bad in (None, [1], b"x", "a\0b")
        ),
        ([], {}, r"command: \[\] is not a list of words; write"),
        (["recipes"], {}, "lockstep launch can't run 'recipes'"),
        ([*TRAIN, "optim.lrr=1"], {}, "unknown key; did you mean lr?"),
        (TRAIN, {"sweep": {"optim.lr": "0.1"}}, "optim.lr: '0.1' is not a list of values without commas"),
        (TRAIN, {"sweep": {"optim.lr": [1, "x"]}}, "optim.lr: 'x' is not a number"),
    ],
)
def test_mistakes_are_refused_before_anything_is_submitted(command: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(lockstep.ConfigError, match=message):
        lockstep.submit("queue", command, **options)
    assert CODES == {}
    assert list(Path().iterdir()) == []


def test_numbers_and_paths_are_words_and_texts() -> None:
    config = Path("a b.yaml")
    config.write_text((ROOT / "recipes" / "digits.yaml").read_text())
    lockstep.submit("queue", ["train", config, "run.folder=r", "--model.compile", False], tag=[Path("x"), 5])
    typed = json.loads(Path("r/launch/job.json").read_text())["command"]
    assert typed == "lockstep launch queue --tag=x --tag=5 train 'a b.yaml' run.folder=r --model.compile false"


@pytest.mark.parametrize("bad", [None, b"5", ["5"], True, "", 2.5j])
def test_what_names_no_job_is_refused(bad: Any) -> None:
    with pytest.raises(lockstep.ConfigError, match=r"job: .* is neither the identifier of a job nor the folder"):
        lockstep.find_job("queue", bad)


@pytest.mark.parametrize(
    ("where", "ending"), [("slrum", "did you mean slurm"), (None, "lockstep train"), (b"x", "lockstep train"), ("", "")]
)
def test_an_unknown_place_lists_the_places(where: Any, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.cli.launch_api.find_launcher", find_launcher)
    for function, last in ((lockstep.submit, TRAIN), (lockstep.find_job, "1")):
        with pytest.raises(lockstep.ConfigError, match=f"no place to launch at, which are aws, docker, .*; {ending}"):
            function(where, last)


def test_the_example_submits_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "submit_from_python.py"))
    assert example["main"]("queue") == 0
    assert capsys.readouterr().out == "j0: None\nj1: None\n"


@pytest.mark.parametrize("where", sorted(BUILTIN))
def test_a_job_that_is_not_known_is_refused_with_those_that_are(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    those = rf"; of {where} there are (its-own \(runs/a\), swept \(runs/s/0\)|swept \(runs/s/0\), its-own \(runs/a\))$"
    for verb in ("status", "follow", "cancel"):
        for text, message in {
            "no such/": "'no such/' is neither .* nor the folder of .*" + those,
            "": "'' is neither .* nor the folder of .*" + those,
            "another's": rf"another's is a job of {other} \(b\), not of {where}: lockstep launch {other} ",
            "plain": "plain has no launch/job.json: no job was launched for it; give the job's identifier or .*"
            + those,
            "runs/damaged": "runs/damaged/launch/job.json is damaged; give the job's identifier",
        }.items():
            assert main(["launch", where, verb, text]) == 2
            assert re.match(f"lockstep: {message}", capsys.readouterr().err)
