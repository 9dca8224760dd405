"""Example files for SkyPilot and Kubeflow: valid, and their commands executed on two nodes of loopback."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kit.commands import run_lockstep, start_lockstep
from kit.manifests import problem_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "run.steps=4", "launch.device=cpu", "monitor.every=1", "precision.compute=fp32", "optim.name=sgd", "optim.lr=0.01",
    "evaluation.at_end=false", "data.train.shift=0",
)  # fmt: skip
TEXTS = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
SKYPILOT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "resources", "num_nodes", "workdir", "envs", "secrets", "setup", "run"],
    "properties": {
        "name": {"type": "string"},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "string", "pattern": r"^[A-Z0-9-]+:\d+$"},
                "use_spot": {"type": "boolean"},
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                        "recover_on_exit_codes": {"type": "array", "items": {"const": 75}},
                    },
                },
            },
        },
        "num_nodes": {"type": "integer", "minimum": 1},
        "workdir": {"const": "."},
        "envs": TEXTS,
        "secrets": TEXTS,
        "setup": {"type": "string"},
        "run": {"type": "string"},
    },
}
"""The part of a SkyPilot task that the example uses; SkyPilot 0.14's own schema accepts the file, too."""


def example(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return loaded


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_trains_as_one_process(run: Path, folder: Path) -> None:
    alone = run_lockstep("train", "digits", *SMALL, "--ranks", 1, "run.folder=alone", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert losses(run) == pytest.approx(losses(folder / "alone"), rel=2e-6)


# --- SkyPilot -------------------------------------------------------------------------------------------------------


def test_skypilots_file_has_its_keys() -> None:
    task = example("skypilot.yaml")
    jsonschema.validate(task, SKYPILOT)
    assert task["secrets"] == {"LOCKSTEP_JOB_TOKEN": None}, "a secret is in no file"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "num_node": 2}, SKYPILOT)


def words_of_node(rank: int, folder: Path, **environment: str) -> list[str]:
    """The command line of Lockstep that the script executes on a node."""
    program = folder / "lockstep"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "words-$SKYPILOT_NODE_RANK"\n')
    program.chmod(0o755)
    variables = {**environment, "SKYPILOT_NODE_RANK": str(rank), "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", example("skypilot.yaml")["run"]], cwd=folder, env=variables, check=True)
    return (folder / f"words-{rank}").read_text().split("\0")[:-1]


def test_skypilots_script_joins_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 2}"  # no other test has it: the port is fixed
    task = example("skypilot.yaml")
    environment = {
        **{name: str(value) for name, value in task["envs"].items()},
        "CHECKPOINTS": str(tmp_path / "bucket"),
        "SKYPILOT_NODE_IPS": f"{address}\n127.0.0.9\n",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-managed-2026-11-23-10-00-00-000000_digits_7-0",
    }
    nodes = []
    for rank in range(2):
        words = words_of_node(rank, tmp_path, **environment)
        (tmp_path / str(rank)).mkdir()
        nodes.append(start_lockstep(*words, *SMALL, cwd=tmp_path / str(rank)))
    assert [node.end() for node in nodes] == [0, 0], nodes[0].output
    [run] = (tmp_path / "0" / "runs").iterdir()
    assert run.name == "digits-sky-managed-2026-11-23-10-00-00-000000_digits_7-0"
    assert any((tmp_path / "bucket").glob("*/manifest.json"))
    assert_trains_as_one_process(run, tmp_path)


# --- Kubeflow -------------------------------------------------------------------------------------------------------


def test_the_trainjob_is_valid() -> None:
    job = example("kubeflow-trainjob.yaml")
    assert problem_of(job) == ""
    misspelt = copy.deepcopy(job)
    misspelt["spec"]["trainer"]["numNode"] = misspelt["spec"]["trainer"].pop("numNodes")
    assert problem_of(misspelt) != ""


def test_the_pods_of_the_pytorchjob_are_valid() -> None:
    job = example("kubeflow-pytorchjob.yaml")
    assert {key: set(job[key]) if isinstance(job[key], dict) else job[key] for key in job} == {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name"},
        "spec": {"nprocPerNode", "pytorchReplicaSpecs"},
    }
    assert isinstance(job["spec"]["nprocPerNode"], str)
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        assert set(replicas) == {"replicas", "restartPolicy", "template"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": replicas["template"]["spec"]}
        assert problem_of(pod) == ""
        assert pod["spec"]["containers"][0]["name"] == "pytorch", "the operator looks for that name"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_of(words: Sequence[str], rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """A pod's command with the variables that Kubeflow sets."""
    petted = {"NNODES": 2, "NPROC_PER_NODE": 1, "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {f"PET_{name}": str(value) for name, value in petted.items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **variables, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.drill
@pytest.mark.parametrize("name", ["kubeflow-trainjob.yaml", "kubeflow-pytorchjob.yaml"])
def test_kubeflows_variables_make_torchrun_join_two_pods(name: str, tmp_path: Path) -> None:
    spec = example(name)["spec"]
    container = spec.get("trainer")
    if container is None:
        container = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    places = {"/tmp/digits": str(tmp_path / "run"), "s3://my-bucket": str(tmp_path / "bucket")}
    words = [*container["command"], *container["args"], *SMALL]
    for text, place in places.items():
        words = [word.replace(text, place) for word in words]
    port = free_port()
    pods = [start_of(words, rank, port, tmp_path) for rank in range(2)]
    errors = [pod.communicate(timeout=120)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], errors
    assert_trains_as_one_process(tmp_path / "run", tmp_path)
