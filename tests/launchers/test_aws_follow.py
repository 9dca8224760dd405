"""`lockstep launch aws follow` against moto's server: what AWS, the network and this machine do to it until the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.aws import BUCKET, Cloud, Fault, Kind, cloud, ends, faults, hurried
from kit.commands import start_lockstep
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.core.errors import Failure
from lockstep.core.jobs import LaunchedJob
from lockstep.launchers import aws_job, tools
from lockstep.launchers.aws import AWS
from lockstep.launchers.aws_calls import AwsCalls
from lockstep.launchers.aws_job import JobObjects, job_named

OPTIONS = ["--type", "g6.12xlarge", "--bucket", BUCKET, "--instance-profile", "train", "--source", "none"]


@pytest.fixture(scope="module")
def running() -> Iterator[Cloud]:
    with cloud() as running:
        yield running


@pytest.fixture
def moto(running: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return hurried(running, tmp_path, monkeypatch)


def launched(moto: Cloud, capsys: pytest.CaptureFixture[str], *options: object) -> LaunchedJob:
    """A job on two instances."""
    words = ["launch", "aws", "--nodes", "2", "--program", "lockstep", *OPTIONS, "--ami", moto.image]
    assert main([*words, *map(str, options), "train", "digits", "run.folder=run"]) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("aws job "))
    return LaunchedJob(line.split()[2].rstrip(";"))


def place_of(job: LaunchedJob) -> str:
    return job.number.split("/", 1)[1].partition("/")[2]


def terminated(moto: Cloud, *nodes: int) -> None:
    """Instances end as AWS ends them: their script reports nothing."""
    ec2 = moto.client("ec2")
    live = [{"Name": "instance-state-name", "Values": ["running"]}]
    reservations = ec2.describe_instances(Filters=live)["Reservations"]
    by_node = {each["AmiLaunchIndex"]: each["InstanceId"] for group in reservations for each in group["Instances"]}
    ec2.terminate_instances(InstanceIds=[by_node[node] for node in nodes])


def meanwhile(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """Do these steps while a job is followed, one each time that its log was printed."""
    print_log, left = JobObjects.print_log, [*steps]

    def printed(objects: JobObjects) -> None:
        print_log(objects)
        if left:
            left.pop(0)()

    monkeypatch.setattr(JobObjects, "print_log", printed)


FAILING: list[tuple[Kind, str]] = [
    ("throttled", "(RequestLimitExceeded)"),
    ("expired", "(ExpiredToken)"),
    ("skewed", "(RequestTimeTooSkewed)"),
    ("cut off", "Could not connect"),
]


@pytest.mark.parametrize(("kind", "note"), FAILING, ids=[kind for kind, _ in FAILING])
def test_what_fails_for_a_while_is_borne(
    kind: Kind, note: str, moto: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launched(moto, capsys)
    planned = Fault(-1, kind, ".", times=0)
    meanwhile(monkeypatch, lambda: setattr(planned, "times", 15), lambda: ends(moto, job.number, 0, 0))
    with faults(planned):
        assert AWS.follow(job) == 0
    done = capsys.readouterr()
    assert done.out == "step 1\nstep 2\n"
    assert done.err.count(f"{note}") == 1
    assert gives(done.err, "the job continues", "5 minutes")
    assert moto.left() == []


def test_what_fails_for_long_ends_the_following_and_not_the_job(
    moto: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launched(moto, capsys)
    monkeypatch.setattr(tools, "_PATIENCE_S", -1.0)
    planned = Fault(-1, "expired", ".", times=0)
    meanwhile(monkeypatch, lambda: setattr(planned, "times", 1000))
    with faults(planned), pytest.raises(Failure) as raised:
        AWS.follow(job)
    assert "(ExpiredToken)" in str(raised.value)
    assert gives(str(raised.value), "the job continues", f"lockstep launch aws follow {job.number}")
    assert AWS.status(job).text.endswith("instances 2 running")
    AWS.cancel(job)
    assert moto.left() == []


def test_an_instance_that_never_reports_is_given_up(moto: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    job = launched(moto, capsys, "--boot-minutes", 0.0005)
    moto.put(f"{place_of(job)}/logs/0", "instance 0 has started\n")
    assert AWS.follow(job) == 1
    done = capsys.readouterr()
    assert done.out == "instance 0 has started\n"
    assert gives(done.err, "note", "instance 1", "0.0005 minutes")
    assert "aws ec2 get-console-output --region us-east-1 --instance-id i-" in done.err
    assert moto.left() == []


@pytest.mark.parametrize("nodes", [(0, 1), (1,)], ids=["all", "one"])
def test_instances_that_aws_terminates_end_the_job(
    nodes: tuple[int, ...], moto: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launched(moto, capsys)
    monkeypatch.setattr(aws_job, "_OTHERS_S", 0.0)
    meanwhile(monkeypatch, lambda: terminated(moto, *nodes))
    assert AWS.follow(job) == 1
    text = capsys.readouterr().err
    assert f"instances {'2' if len(nodes) == 2 else '1 running, 1'} terminated" in text
    assert gives(text, "exit code 1", "Client.UserInitiatedShutdown") == (len(nodes) == 2)
    assert gives(text, "note", "1 instances") == (len(nodes) == 1)
    assert moto.left() == []


def test_spot_instances_that_are_taken_back_after_they_have_saved(
    moto: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launched(moto, capsys, "--spot")
    steps = (lambda: terminated(moto, 1), lambda: ends(moto, job.number, 75, 75), lambda: terminated(moto, 0))
    meanwhile(monkeypatch, *steps)
    assert AWS.follow(job) == 75
    assert Path("run/summary.json").exists()
    assert moto.left() == []


def test_a_job_that_another_command_cancels(
    moto: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launched(moto, capsys)
    meanwhile(monkeypatch, lambda: aws_job.remove(AwsCalls("us-east-1"), job_named(job.number)))
    instances = aws_job.instances
    live = [{"Name": "instance-state-name", "Values": ["running"]}]
    monkeypatch.setattr(aws_job, "instances", lambda calls, job, *_: instances(calls, job, *live))
    assert AWS.follow(job) == 130
    assert f"AWS job {job.number}: removed" in capsys.readouterr().err
    assert moto.left() == []


def test_results_that_cannot_be_written_stay_and_nothing_runs(moto: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    job = launched(moto, capsys)
    ends(moto, job.number, 0, 0)
    Path("run/summary.json").mkdir()
    with pytest.raises(Failure) as raised:
        AWS.follow(job)
    text = str(raised.value)
    assert gives(text, "run/summary.json", "Is a directory", f"s3://my-bucket/{place_of(job)}")
    assert gives(text, f"lockstep launch aws follow {job.number}")
    assert all(name.startswith(place_of(job)) for name in moto.left()), "only objects are left"
    Path("run/summary.json").rmdir()
    assert AWS.follow(job) == 0
    assert Path("run/summary.json").read_text() == "{}"
    assert moto.left() == []


def test_results_that_are_not_fetched_from_instances_that_cannot_be_ended(
    moto: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launched(moto, capsys)
    ends(moto, job.number, 3, 0)
    refused = [Fault(-1, "refused", pattern, times=9) for pattern in ("GET summary.json", "TerminateInstances")]
    with faults(*refused), pytest.raises(Failure) as raised:
        AWS.follow(job)
    assert str(raised.value).startswith("s3:GetObject failed ")
    assert gives(str(raised.value), "be paid for", "ec2:TerminateInstances")
    assert AWS.follow(job) == 3
    assert moto.left() == []


def drilled(number: signal.Signals) -> Any:
    return pytest.param(number, id=number.name, marks=[] if number == signal.SIGTERM else pytest.mark.drill)


@pytest.mark.parametrize("number", [drilled(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
def test_a_signal_ends_the_following_and_not_the_job(
    number: signal.Signals, moto: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launched(moto, capsys)
    process = start_lockstep("launch", "aws", "follow", job.number, cwd=tmp_path)
    process.wait_for(lambda: "instances 2 running" in process.output)
    process.send(number)
    assert process.end() == 130
    ways = "; ".join(f"lockstep launch aws {verb} {job.number}" for verb in ("follow", "cancel"))
    assert gives(process.output, "the job continues", ways)
    assert process.output.endswith(f"stopped by {number.name}\n")
    assert AWS.status(job).text.endswith("instances 2 running")
    AWS.cancel(job)
    assert moto.left() == []


# --- logs -----------------------------------------------------------------------------------------------------------


def put_at_once(objects: dict[str, bytes]) -> None:
    """Put objects into moto's memory: a thousand by HTTP take seconds."""
    from moto.s3.models import s3_backends

    for name, data in objects.items():
        s3_backends["123456789012"]["aws"].put_object(BUCKET, name, data)


def test_a_log_that_grows_is_printed_once(moto: Cloud, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    objects = JobObjects(AwsCalls("us-east-1"), job_named(f"us-east-1/{BUCKET}/digits-1"))
    objects.print_log()
    assert capsys.readouterr().out == "", "there is none yet"
    for text, shown in (
        ("step 1\nst", "step 1\nst"),
        ("step 1\nstep 2\nof a li", "ep 2\nof a li"),
        ("step 1\nstep 2\nof a li", ""),
    ):
        put_at_once({"digits-1/logs/0": text.encode()})
        objects.print_log()
        assert capsys.readouterr().out == shown

    put_at_once({"digits-1/results/weights.bin": bytes(range(256)) * 20, "digits-1/results/empty": b""})
    assert objects.fetch(tmp_path / "run", 1) == 2
    assert (tmp_path / "run/weights.bin").read_bytes() == bytes(range(256)) * 20
    assert (tmp_path / "run/empty").read_bytes() == b""
    assert (tmp_path / "run/launch/node-0.log").read_text() == "step 1\nstep 2\nof a li"
    assert objects.delete() == 3
