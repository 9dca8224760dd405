"""What `launch ray` would submit, what is refused before that, and what a job's state means."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.launchers.ray import JobOutput, _status

TRAIN = ["train", "digits", "run.folder=runs/a"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The job, its driver's order, and the command line that would submit it."""
    assert main(["launch", "ray", "--dry-run", *words]) == 0
    assert list(Path().iterdir()) == [], "a dry run writes nothing"
    out, err = capsys.readouterr()
    job = json.loads(out)
    [line] = [line for line in err.splitlines() if line.startswith("would execute: ")]
    return job, json.loads(shlex.split(job["entrypoint"])[-1]), shlex.split(line.removeprefix("would execute: "))


def test_each_node_is_a_bundle_and_the_driver_has_the_whole_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [
        *(
            "--nodes",
            "2",
            "--gpus-per-node",
            "8",
            "--resource",
            "accelerator_type:H100=0.5",
            "--program",
            "/opt/my lock",
        ),
        *("--env", "NCCL_DEBUG=INFO", "--wait", "60", "--retries", "3", "--grace", "90", "--address", "head:8265"),
    ]
    job, order, line = planned(capsys, *options, *TRAIN, "--ranks", "4", "run.folder=it's here")
    assert job["address"] == "http://head:8265"
    assert order == {
        "job": job["submission_id"],
        "words": ["train", "digits", "run.folder=runs/a", "--ranks", "4", "run.folder=it's here"],
        "restart_words": ["train", "digits", "run.folder=runs/a", "--ranks", "4", "run.folder=it's here"],
        "nodes": 2,
        "bundle": {"CPU": 4, "GPU": 8, "accelerator_type:H100": 0.5},
        "folder": str(tmp_path),
        "logs": f"{tmp_path}/it's here/launch",
        "program": "/opt/my lock",
        "wait": 60,
        "retries": 3,
        "grace": 90,
        "environment": {"NCCL_DEBUG": "INFO"},
    }
    assert job["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}
    assert line[:4] == ["ray", "job", "submit", "--no-wait"]
    assert line[line.index("--") + 1 :] == shlex.split(job["entrypoint"])


@pytest.mark.parametrize(
    ("words", "cpus"),
    [
        ([*TRAIN], 1),
        ([*TRAIN, "--ranks", "3"], 3),
        (["--gpus-per-node", "8", *TRAIN], 8),
        (["--cpus-per-node", "64", *TRAIN, "--ranks", "3"], 64),
        (["doctor"], 1),
    ],
)
def test_a_node_takes_a_cpu_for_each_rank_or_gpu(
    words: list[str], cpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(capsys, *words)[1]["bundle"]["CPU"] == cpus


def test_an_uploaded_folder_keeps_its_run_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job, order, _ = planned(capsys, "--upload", "train", "digits", "run.folder=/shared/a")
    assert job["runtime_env"]["working_dir"] == str(tmp_path)
    assert ".git" in job["runtime_env"]["excludes"]
    assert order["folder"] is None
    planned(capsys, "--upload", *TRAIN, "checkpoint.folder=s3://bucket/a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2", "verify", "digits"], "--nodes: 2, but `lockstep verify` runs on one node; leave it out"),
        (
            ["--address", "ray://head:10001", *TRAIN],
            "--address: 'ray://head:10001' is no dashboard's address",
        ),
        (
            ["--address", "auto", *TRAIN],
            "--address: 'auto' is no dashboard's address, such as http://HEAD:8265",
        ),
        (["--resource", "TPU", *TRAIN], "--resource: 'TPU' is not NAME=AMOUNT, such as accelerator_type:H100=0.001"),
        (["--env", "NAME", *TRAIN], "--env: 'NAME' is not NAME=VALUE, such as NCCL_DEBUG=INFO"),
        (["--env", "HF_TOKEN=abc", *TRAIN], "--env: HF_TOKEN looks like a secret, and Ray's dashboard shows its value"),
        (["--upload", "--folder", "/x", *TRAIN], "--upload: copies this folder, and --folder names a shared one"),
        (["--upload", *TRAIN], "run.folder: would be lost with Ray's copy of this folder; give an absolute"),
        (["--retries", "1", *TRAIN, "--fresh"], "--fresh, --from, --fork: would start over with each retry; leave out"),
        (["--wait", "-1", *TRAIN], "--wait: '-1' is not a number of 0 or more"),
        (["status", "../a b"], "'../a b' is neither the id of a Ray job nor the folder of a run that Ray was given"),
        (["status", "ftp://x/y"], "'ftp://x/y' is neither the id of a Ray job nor the folder of a run that Ray was"),
    ],
)
def test_mistakes_are_refused_here(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ray", *words]) == 2
    assert capsys.readouterr().err.startswith(f"lockstep: {message}")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("is_variable", [True, False])
def test_where_no_dashboard_answers(
    is_variable: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        if is_variable:
            monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
        options = [] if is_variable else ["--address", address]
        assert main(["launch", "ray", *options, *TRAIN]) == 1
    assert gives(capsys.readouterr().err, address, os.strerror(errno.ECONNREFUSED), "--address http://HEAD:8265")
    assert list(Path().iterdir()) == []


def test_where_ray_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray.job_submission", None)
    assert main(["launch", "ray", *TRAIN]) == 1
    assert "Ray isn't installed for " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "exit_code", "text", "code"),
    [
        ("PENDING", None, "PENDING (waits for CPUs)", None),
        ("RUNNING", None, "RUNNING", None),
        ("SUCCEEDED", 0, "SUCCEEDED", 0),
        ("STOPPED", None, "STOPPED", 130),
        ("FAILED", 75, "FAILED, exit code 75", 75),
        ("FAILED", 2, "FAILED, exit code 2", 2),
        ("FAILED", -9, "FAILED, exit code 1", 1),
        ("FAILED", 137, "FAILED, exit code 1", 1),
        ("FAILED", None, "FAILED, exit code 1 (waits for CPUs)", 1),
    ],
)
def test_a_state_has_the_exit_code_of_the_run(state: str, exit_code: int | None, text: str, code: int | None) -> None:
    pytest.importorskip("aiohttp")
    info = SimpleNamespace(status=SimpleNamespace(value=state), driver_exit_code=exit_code, message="waits for\nCPUs")
    status = _status(cast("Any", SimpleNamespace(get_job_info=lambda _: info)), "a-1")
    assert (status.text, status.code) == (f"Ray job a-1: {text}", code)


def test_output_is_printed_once_without_rays_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = JobOutput()
    text = (
        "2026-11-23 10:00:00,000\tINFO job_manager.py:5 -- Runtime env\nRunning entrypoint for job a: x\none\ntwo\nth"
    )
    output.print_new(text[:-4], 0)
    output.print_new(text, 0)  # connected again
    assert capsys.readouterr().out == "one\ntwo\n"
    output.print_new("ree\n", len(text))
    assert capsys.readouterr().out == "three\n"
