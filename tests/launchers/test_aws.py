"""`lockstep launch aws` against moto's server by real boto3: the whole life of a job, and a fault at each call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.aws import BUCKET, Cloud, Fault, Kind, cloud, ends, faults, hurried
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.core import stopping
from lockstep.core.errors import Failure
from lockstep.core.jobs import JobCommand, LaunchedJob, LaunchPlan
from lockstep.launchers import aws, aws_calls, aws_job, tools
from lockstep.launchers.aws import AWS
from lockstep.launchers.aws_options import AwsOptions

TRAIN = ["train", "digits", "--ranks", "1"]
OPTIONS = ["--type", "g6.12xlarge", "--bucket", f"{BUCKET}/l", "--instance-profile", "train", "--source", "none"]


@pytest.fixture(scope="module")
def running() -> Iterator[Cloud]:
    with cloud() as running:
        yield running


@pytest.fixture
def moto(running: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return hurried(running, tmp_path, monkeypatch)


def launch(*words: object) -> int:
    return main(["launch", "aws", *map(str, words)])


def job_of(capsys: pytest.CaptureFixture[str]) -> str:
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("aws job "))
    return line.split()[2].rstrip(";")


def test_the_whole_life_of_a_job(moto: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--nodes", 2, *OPTIONS, "--ami", moto.image, *TRAIN, "run.folder=run") == 0
    job = job_of(capsys)
    assert job.startswith(f"us-east-1/{BUCKET}/l/digits-")

    assert launch("status", "run") == 0
    assert capsys.readouterr().out == f"AWS job {job}: instances 2 running\n"
    os.rename("run", "elsewhere")
    assert launch("status", job) == 0
    assert capsys.readouterr().out == f"AWS job {job}: instances 2 running\n"
    os.rename("elsewhere", "run")
    assert launch("--nodes", 2, *OPTIONS, "--ami", moto.image, *TRAIN, "run.folder=run") == 2
    assert "this run has a job already" in capsys.readouterr().err

    ends(moto, job, 75, 75)
    assert launch("follow", job) == 75
    done = capsys.readouterr()
    assert done.out == "step 1\nstep 2\n"
    assert gives(done.err, "2 files", Path("run").absolute())
    assert Path("run/logs/rank-0.log").read_text() == "hello"
    assert Path("run/launch/node-1.log").read_text() == "a note of node 1\n"
    assert moto.left() == []
    for verb in ("cancel", "stop"):
        assert launch(verb, job) == 0
        assert "nothing of AWS job" in capsys.readouterr().err


def test_following_from_the_start_returns_the_exit_code(moto: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: list[str] = []
    start = aws_job.start

    def started(plan: LaunchPlan, record: Any, values: Any) -> None:
        start(plan, record, values)
        remembered.append(record["job"])
        ends(moto, record["job"], 0)

    monkeypatch.setattr(aws, "start", started)
    assert launch("--follow", *OPTIONS, "--ami", "ssm:/my/ami", *TRAIN, "run.folder=run") == 0
    assert Path("run/summary.json").read_text() == "{}"
    assert moto.left() == []
    assert launch("status", "run") == 0
    assert launch("follow", "run") == 0


def test_a_running_job_that_is_canceled_saves_first(moto: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(*OPTIONS, "--ami", moto.image, *TRAIN, "run.folder=run") == 0
    name = next(each for each in moto.objects() if each.endswith("job.json")).rpartition("/")[0]
    moto.put(f"{name}/logs/0", "step 1\n")
    asked = []
    items = aws_calls.AwsCalls.items

    def seen(calls: Any, service: str, operation: str, expression: str, **parameters: Any) -> Any:
        if f"{name}/stop" in moto.objects() and not asked:
            asked.append(True)
            moto.put(f"{name}/ends/0", "75\n")
        return items(calls, service, operation, expression, **parameters)

    monkeypatch.setattr(aws_calls.AwsCalls, "items", seen)
    assert launch("cancel", "run") == 0
    assert asked
    assert moto.left() == []


# --- a fault at each call -------------------------------------------------------------------------------------------


def plan_of() -> LaunchPlan:
    words = ("train", "digits", "run.folder=run")
    command = JobCommand(
        words, words, "typed", "digits", Path("run/launch").absolute(), nodes=True, run_folder=Path("run")
    )
    options = {"type": "g6.12xlarge", "bucket": BUCKET, "instance_profile": "train", "source": "none", "nodes": 2}
    return AWS.plan(command, AwsOptions(**options, ami="ssm:/my/ami"))


CALLS = [
    *("HEAD my-bucket", "PUT job.json", "PUT token", "PUT WHEEL"),
    *("ec2:RunInstances", "ec2:DescribeInstances"),
]


class Ended(BaseException):
    """Instead of the end of the process."""


@pytest.fixture
def at_the_end(moto: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What was left when the process would have ended."""
    left: list[list[str]] = []

    def end(code: int) -> None:
        left.append([f"exit code {code}", *moto.left()])
        raise Ended

    before = {number: signal.getsignal(number) for number in (*stopping.STOP_SIGNALS, stopping.SAVE_SIGNAL)}
    monkeypatch.setattr(os, "_exit", end)
    stopping.stop_at_once()
    yield left
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_calls_of_a_launch(moto: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    with faults() as calls:
        number = AWS.submit(plan)
    assert ["PUT WHEEL" if ".whl" in each else each for each in calls] == CALLS
    AWS.cancel(LaunchedJob(number))
    assert moto.left() == []


KINDS: tuple[Kind, ...] = ("refused", "lost", "never answered", "stopped before", "stopped after")
FAULTS = [
    pytest.param(at, kind, id=f"{call}-{kind}", marks=[] if number == at % len(KINDS) else pytest.mark.drill)
    for at, call in enumerate(CALLS)
    for number, kind in enumerate(KINDS)
    if kind != "never answered" or call not in ("HEAD my-bucket", "ec2:DescribeInstances")  # they change nothing
]


@pytest.mark.parametrize(("at", "kind"), FAULTS)
def test_a_fault_at_each_call_leaves_nothing(
    at: int,
    kind: Kind,
    moto: Cloud,
    at_the_end: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(aws, "wheel", lambda: b"wheel")  # it takes time to make
    plan = plan_of()
    with faults(Fault(at, kind)) as calls:
        try:
            number = AWS.submit(plan)
        except Ended:
            assert at_the_end == [["exit code 130"]]
            assert "stopped by SIGINT" in capfd.readouterr().err
        except Failure:
            assert kind in ("refused", "never answered")
        else:
            assert kind == "lost", f"{kind} at {CALLS[at]} went unnoticed"
            AWS.cancel(LaunchedJob(number))
    assert len(calls) > at
    assert moto.left() == []


def test_what_passes_is_tried_again(moto: Cloud) -> None:
    with faults(Fault(-1, "no capacity", "RunInstances"), Fault(-1, "throttled", "DescribeInstances")) as calls:
        number = AWS.submit(plan_of())
    assert calls.count("ec2:RunInstances") == calls.count("ec2:DescribeInstances") == 2
    AWS.cancel(LaunchedJob(number))
    assert moto.left() == []


def test_what_cannot_be_removed_is_named(moto: Cloud) -> None:
    plan = plan_of()
    planned = (Fault(-1, "refused", "DescribeInstances"), Fault(-1, "refused", "TerminateInstances"))
    with faults(*planned), pytest.raises(Failure) as raised:
        AWS.submit(plan)
    assert gives(str(raised.value), "ec2:TerminateInstances", "us-east-1", "UnauthorizedOperation")
    number = str(raised.value).rpartition("lockstep launch aws cancel ")[2]
    AWS.cancel(LaunchedJob(number))
    assert moto.left() == []


ENDINGS = [pytest.param(at, marks=[] if at in (0, 6, 12) else pytest.mark.drill) for at in range(30)]


@pytest.mark.parametrize("at", ENDINGS)
def test_a_fault_at_the_end_can_be_repeated(at: int, moto: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "wheel", lambda: b"wheel")
    monkeypatch.setattr(tools, "_PATIENCE_S", -1.0)
    number = AWS.submit(plan_of())
    ends(moto, number, 0, 0)
    with faults(Fault(at, "refused")) as calls:
        try:
            assert AWS.follow(LaunchedJob(number)) == 0
        except Failure:
            assert len(calls) > at
            assert AWS.follow(LaunchedJob(number)) == 0
        else:
            assert len(calls) <= at, f"the fault at {calls[at]} went unnoticed"
    assert Path("run/summary.json").read_text() == "{}"
    assert moto.left() == []
