"""`lockstep launch kubernetes` with a program instead of kubectl: its calls, their failures, the ends of jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import run_lockstep
from kit.failures import gives
from kit.manifests import problem_of
from kit.programs import Program

from lockstep.cli.main import main
from lockstep.launchers import kubernetes, tools

TRAIN = ["train", "digits", "run.folder=runs/a"]
LAUNCH = ["launch", "kubernetes"]
OPTIONS = ["--image", "me/train:1", "--volume", "work:/work", "--namespace", "ml"]


class Cluster(Program):
    """A program named kubectl."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "kubectl")

    def answer(self, answers: dict[str, list[tuple[str, str]]]) -> None:
        known = {"config current-context": [("here\n", "")], "get jobs.batch/": [("abc-123", "")]}
        super().answer({**answers, **known} if "get" not in str(answers) else answers)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in ("bin", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(kubernetes, "_POLL_S", 0.0)
    return Cluster(tmp_path / "bin")


def condition(name: str, message: str = "") -> dict[str, str]:
    return {"type": name, "status": "True", "message": message}


def job(*conditions: dict[str, str]) -> tuple[str, str]:
    return json.dumps({"status": {"conditions": conditions}}), ""


def pods(*those: dict[str, Any]) -> tuple[str, str]:
    return json.dumps({"items": those}), ""


def pod(name: str, phase: str, code: int | None = None, index: int = 0, **status: Any) -> dict[str, Any]:
    ended = [] if code is None else [{"state": {"terminated": {"exitCode": code}}}]
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": f"2026-11-23T10:00:0{name[-1]}Z",
            "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"containers": [{"name": "lockstep"}]},
        "status": {"phase": phase, "containerStatuses": ended, **status},
    }


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Launch a job, and return its identifier."""
    assert main([*LAUNCH, *words]) == 0
    match = re.search(r"kubernetes job (\S+);", capsys.readouterr().err)
    assert match
    return match[1]


# --- submitting -----------------------------------------------------------------------------------------------------


def test_a_job_is_tried_and_then_created_with_its_secret(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    number = launched(capsys, *OPTIONS, "--nodes", "2", *TRAIN)
    namespace, kind, name = number.split("/")
    assert (namespace, kind) == ("ml", "job")
    calls = cluster.calls()
    words = [call.words for call in calls]
    verbs = [call.removeprefix("--namespace=ml ").partition(" --")[0].partition(" '--")[0] for call in words]
    assert verbs == [
        "config current-context", "create", f"create secret generic {name}", "create", f"get jobs.batch/{name}",
        f"patch service/{name}", f"patch secret/{name}",
    ]  # fmt: skip
    assert "--dry-run=server" in words[1]
    assert '"uid": "abc-123"' in words[-1]
    [token] = [call.stdin for call in calls if call.stdin]
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert all(token not in call for call in words), "a secret is on no command line"
    written = [path for path in Path().rglob("*") if path.is_file()]
    assert {path.name for path in written} == {"job.yaml", "job.json"}
    assert all(token not in path.read_text() for path in written)
    manifests = list(yaml.safe_load_all(Path("runs/a/launch/job.yaml").read_text()))
    assert [problem_of(manifest) for manifest in manifests] == ["", ""]
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {"LOCKSTEP_JOB_TOKEN": token},
    }
    assert problem_of(secret) == ""
    assert problem_of({**secret, "stringdata": {}}) != ""


def test_one_pod_needs_no_secret_and_the_context_is_remembered(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    number = launched(capsys, *OPTIONS[:4], "--context", "arn:aws:eks:x/y", *TRAIN)
    assert number.startswith("arn:aws:eks:x/y/default/job/digits-")
    assert [call.words.partition(" ")[0] for call in cluster.calls()] == ["--context=arn:aws:eks:x/y"] * 3
    cluster.answer({"get jobs": [job(condition("Complete"))], "get pods": [pods()]})
    assert main([*LAUNCH, "status", number]) == 0
    assert capsys.readouterr().out == f"Kubernetes {number}: completed\n"
    assert cluster.calls()[-1].words.startswith("--context=arn:aws:eks:x/y --namespace=default get pods")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("config current-context", "error: current-context is not set"),
        ("create --dry-run", "The connection to the server localhost:8080 was refused"),
        ("create secret", "secrets is forbidden: User me cannot create"),
        ("create --filename", "exceeded quota: gpus"),
        ("get jobs", "Forbidden"),
        ("patch service", "Forbidden"),
        ("patch secret", "Forbidden"),
    ],
)
def test_nothing_is_left_when_a_call_fails(
    call: str, error: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answer({"get": [("abc", "")], call: [("", error)]} if "get" not in call else {call: [("", error)]})
    assert main([*LAUNCH, *OPTIONS, "--nodes", "2", *TRAIN]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    *notes, failure = written.err.splitlines()
    assert all(note.startswith("note: ") for note in notes)
    assert f"kubectl failed: {error}" in failure
    calls = [call.words for call in cluster.calls()]
    name = calls[-1].rpartition("/")[2]
    made = any("create secret" in words for words in calls)
    deletes = f"--namespace=ml delete --ignore-not-found --wait=false jobs.batch/{name} service/{name} secret/{name}"
    assert (calls[-1] == deletes) is made
    assert not Path("runs/a").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_submission_leaves_nothing(number: signal.Signals, cluster: Cluster, tmp_path: Path) -> None:
    cluster.answer({"create --filename": [("stop", "")], "get jobs": [("abc", "")]})
    done = run_lockstep(*LAUNCH, *OPTIONS, "--nodes", "2", *TRAIN, PATH=os.environ["PATH"], STOP=str(int(number)))
    assert done.returncode == 130, done
    call = cluster.calls()[-1].words
    assert re.search(r"delete .* jobs\.batch/(\S+) service/\1 secret/\1$", call)


def test_what_can_not_be_deleted_is_named(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.answer({"get": [("abc", "")], "create --filename": [("", "quota")], "delete": [("", "no connection")]})
    assert main([*LAUNCH, *OPTIONS, "--nodes", "2", *TRAIN]) == 1
    assert re.search(r"quota; .*: kubectl .* secret/", capsys.readouterr().err)


def test_where_kubectl_is_not_installed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([*LAUNCH, *OPTIONS, *TRAIN]) == 1
    assert gives(capsys.readouterr().err, "kubectl", "--dry-run")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


# --- following ------------------------------------------------------------------------------------------------------


def follow(cluster: Cluster, answers: dict[str, list[tuple[str, str]]], number: str = "ml/job/digits-1") -> int:
    cluster.answer(answers)
    return main([*LAUNCH, "follow", number])


def test_a_preempted_job_is_followed_over_its_pods(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    taken, again = pod("p-1", "Failed", 75), pod("p-2", "Running")
    image = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    code = follow(
        cluster,
        {
            "get jobs": [job(), job(), job(), job(), job(condition("Complete"))],
            "get pods": [
                pods(),
                pods(pod("p-1", "Pending", containerStatuses=[{"state": image}])),
                pods(pod("p-1", "Running")),
                pods(taken, again, pod("p-3", "Running", index=1)),
                pods(taken, pod("p-2", "Succeeded", 0)),
            ],
            "logs --follow --timestamps --container=lockstep p-1": [
                ("2026-11-23T10:00:01.1Z step 1\n2026-11-23T10:00:01.2Z step 2\n", "connection reset"),
            ],
            "logs --follow --timestamps --container=lockstep --since-time=2026-11-23T10:00:01.2Z p-1": [
                ("2026-11-23T10:00:01.2Z step 2\n2026-11-23T10:00:01.3Z saved\x1b\n", ""),
            ],
            "logs --follow --timestamps --container=lockstep p-2": [("2026-11-23T10:00:02.1Z resumes\n", "")],
            "logs --follow --timestamps --container=lockstep --since-time=2026-11-23T10:00:02.1Z p-2": [("", "")],
        },
    )
    written = capsys.readouterr()
    assert code == 0
    assert written.out == "step 1\nstep 2\nsaved\\x1b\nresumes\n"
    assert written.err.splitlines() == [
        "Kubernetes ml/job/digits-1: 0 of 1 pods running (ImagePullBackOff: no such image)",
        "Kubernetes ml/job/digits-1: 1 of 1 pods running",
        "Kubernetes ml/job/digits-1: 2 of 2 pods running, restart 1",
        "--- p-2",
        "Kubernetes ml/job/digits-1: completed, restart 1",
    ]


@pytest.mark.parametrize(
    ("message", "codes", "code"),
    [
        ("Container lockstep for pod ml/p-1 failed with exit code 2 matching FailJob rule at index 2", [2, 2], 2),
        ("Job has reached the specified backoff limit", [1, 9], 9),
        ("Job has reached the specified backoff limit", [75], 75),
        ("Job was active longer than specified deadline", [], 1),
    ],
)
def test_a_failed_job_has_the_exit_code_of_its_run(
    message: str, codes: list[int], code: int, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = [pod(f"p-{number}", "Failed", each, index=1) for number, each in enumerate(codes)]
    answers = {"get jobs": [job(condition("Failed", message))], "get pods": [pods(*ended)]}
    assert follow(cluster, answers) == code
    assert gives(capsys.readouterr().err, "ml/job/digits-1", f"exit code {code}", message)


def test_a_container_that_was_killed_has_its_reason(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    killed = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    ended = pods(pod("p-1", "Failed", index=1, containerStatuses=[killed]))
    assert follow(cluster, {"get jobs": [job(condition("Failed", "BackoffLimitExceeded"))], "get pods": [ended]}) == 137
    assert gives(capsys.readouterr().err, "exit code 137 (OOMKilled)", "BackoffLimitExceeded")


def test_following_outlasts_a_short_outage(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    outage = ("", "Unable to connect to the server: EOF")
    answers = {"get jobs": [job(), outage, outage, job(condition("Complete"))], "get pods": [pods()]}
    assert follow(cluster, answers) == 0
    monkeypatch.setattr(tools, "_PATIENCE_S", 0.0)
    assert follow(cluster, {"get jobs": [job(), outage], "get pods": [pods()]}) == 1


def test_a_job_that_is_deleted_was_canceled(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ("", 'Error from server (NotFound): jobs.batch "digits-1" not found')
    assert follow(cluster, {"get jobs": [job(), gone], "get pods": [pods()]}) == 130
    assert main([*LAUNCH, "status", "ml/job/digits-1"]) == 2
    assert gives(capsys.readouterr().err, "knows no", "ml/job/digits-1")


def test_a_job_is_canceled_by_deleting_it(cluster: Cluster) -> None:
    cluster.answer({"get jobs.batch": [job()], "get pods": [pods()]})
    assert main([*LAUNCH, "cancel", "ml/job/a"]) == 0
    calls = [call.words for call in cluster.calls()]
    assert calls[-1] == "--namespace=ml delete --ignore-not-found --wait=false jobs.batch/a"
    assert "batch.kubernetes.io/job-name=a" in calls[1]
    cluster.answer({"get jobs.batch": [job(condition("Complete"))], "get pods": [pods()]})
    assert main([*LAUNCH, "cancel", "ml/job/a"]) == 2


@pytest.mark.parametrize("number", ["digits-1", "job/digits-1", "ml/jobset/digits-1", "ml/job/"])
def test_an_identifier_has_three_parts(number: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH, "status", number]) == 2
    assert gives(capsys.readouterr().err, number, "NAMESPACE/job/NAME")
    assert cluster.calls() == []


# --- the page -------------------------------------------------------------------------------------------------------


def page_commands() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("lockstep launch kubernetes --")]
    return [[word for word in words[3:] if word not in ("--dry-run", "--follow")] for words in lines]


@pytest.mark.parametrize("words", page_commands(), ids=lambda words: str(len(words)))
def test_each_command_of_the_page_gives_valid_manifests(
    words: list[str], cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LAUNCH, "--dry-run", *words]) == 0
    for manifest in yaml.safe_load_all(capsys.readouterr().out):
        assert problem_of(manifest) == ""
