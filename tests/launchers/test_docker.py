"""`lockstep launch docker` with a program instead of docker: its compose files, its calls, the ends of jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import run_lockstep
from kit.compose import problem_of
from kit.failures import gives
from kit.programs import Program

from lockstep.cli.main import main
from lockstep.launchers import docker

LAUNCH = ["launch", "docker"]
IMAGE = ["--image", "me/train:1"]
TRAIN = ["train", "digits", "run.folder=runs/a"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder."""
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def engine(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(docker, "_POLL_S", 0.0)
    return Program(tmp_path / "bin", "docker")


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the compose file, which is valid."""
    assert main([*LAUNCH, "--dry-run", *words]) == 0
    compose: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert problem_of(compose) == ""
    return compose


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*LAUNCH, "--dry-run", *words]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err.removeprefix("lockstep: ")


# --- compose files --------------------------------------------------------------------------------------------------


def test_containers_see_the_current_folder_as_you(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data").mkdir()
    words = [*IMAGE, "--nodes", "2", "--volume", "data:/data:ro", "--grace", "300", *TRAIN]
    services = dry_run(capsys, *words, "--ranks", "1")["services"]
    assert list(services) == ["node0", "node1"]
    for node, service in enumerate(services.values()):
        assert service["user"] == f"{os.getuid()}:{os.getgid()}"
        assert (service["image"], service["entrypoint"], service["working_dir"]) == (
            "me/train:1",
            ["lockstep"],
            str(here),
        )
        assert service["stop_grace_period"] == "300s"
        job = service["container_name"].removesuffix(f"-node{node}")
        joining = ["--nodes", "2", "--rendezvous", "node0:29500", "--node-rank", str(node), "--job-id", job]
        assert service["command"] == [*TRAIN, "--ranks", "1", *joining]
        seen = [(each["source"], each["target"], each.get("read_only", False)) for each in service["volumes"]]
        assert seen == [(str(here), str(here), False), (str(here / "data"), "/data", True)]
        assert all(each["bind"] == {"create_host_path": False} for each in service["volumes"])


def test_words_and_values_reach_the_program_as_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["train", "digits", "run.folder=it's ${HOME} #1: ä"]
    compose = dry_run(capsys, *IMAGE, "--env", "A=$B: '", *odd)
    service = compose["services"]["node0"]
    assert service["command"] == [*odd[:2], "run.folder=it's $${HOME} #1: ä"]
    assert service["environment"]["A"] == "$$B: '"
    assert "LOCKSTEP_JOB_TOKEN" not in service["environment"], "one node meets no other"


def test_a_secret_is_named_and_not_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    assert main([*LAUNCH, "--dry-run", *IMAGE, "--env", "HF_TOKEN", *TRAIN]) == 0
    written = capsys.readouterr()
    assert "very-secret" not in written.out + written.err
    assert yaml.safe_load(written.out)["services"]["node0"]["environment"]["HF_TOKEN"] is None
    refused = refusal(capsys, *IMAGE, "--env", "HF_TOKEN=hf_x", *TRAIN)
    assert gives(refused, "--env:", "HF_TOKEN", "--env HF_TOKEN")
    assert "hf_x" not in refused


def test_an_image_is_built_from_the_dockerfile_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gives(refusal(capsys, *TRAIN), "--image:", "Dockerfile")
    (here / "Dockerfile").touch()
    service = dry_run(capsys, *TRAIN)["services"]["node0"]
    assert service["image"] == "my-project:latest"
    assert service["build"]["context"] == str(here)


def test_paths_that_the_containers_do_not_see_are_refused(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (Path(__file__).parents[2] / "recipes" / "digits.yaml").read_text()
    outside = tmp_path / "its own.yaml"
    outside.write_text(recipe)
    (here / "inside.yaml").write_text(recipe)
    (here / "link.yaml").symlink_to(outside)
    (here / "dead").symlink_to(tmp_path / "other")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    volume = shlex.quote(f"{outside}:{outside}:ro")
    unseen = f"the containers don't see it; give --volume {volume}\n"
    for name in (str(outside), "../its own.yaml"):
        assert refusal(capsys, *IMAGE, "train", name, "run.folder=a") == f"{name}: {unseen}"
    mounted = [*IMAGE, "--volume", f"{outside}:{outside}:ro"]
    for words in (["train", "../its own.yaml"], ["train", "link.yaml"], ["train", "inside.yaml"]):
        assert refusal(capsys, *IMAGE, *words, "run.folder=a") if "inside.yaml" not in words else True
        dry_run(capsys, *mounted, *words, "run.folder=a")
    assert refusal(capsys, *IMAGE, "train", "link.yaml", "run.folder=a").startswith(f"link.yaml: {unseen.rstrip()}")
    assert refusal(capsys, *mounted[:2], "--volume", f"{outside}:/x.yaml", "train", str(outside)).startswith(
        f"{outside}: {unseen.rstrip()}"
    )
    (here / "data.yaml").write_text(f"data: {{train: {{kind: tokens, folder: {corpus}}}}}")
    refused = refusal(capsys, *IMAGE, "train", "stdlib-lm", "data.yaml", "run.folder=a")
    assert gives(refused, f"{corpus}:", f"--volume {corpus}:{corpus}:ro")
    lost = f"run.folder: would be lost with the container; give --volume {tmp_path}/other:{tmp_path}/other"
    assert refusal(capsys, *IMAGE, "train", "digits", "run.folder=dead/a").startswith(lost)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*IMAGE, "--image", "-x", *TRAIN], "--image: expected one argument"),
        ([*IMAGE, "--user", "root", *TRAIN], "--user: 'root' is not UID or UID:GID"),
        ([*IMAGE, "--env", "1A=2", *TRAIN], "--env: '1A=2' is not NAME=VALUE, such as"),
        ([*IMAGE, "--env", "NOT_SET_X", *TRAIN], "--env: NOT_SET_X isn't set here; set it, or write NOT_SET_X=VALUE"),
        ([*IMAGE, "--volume", "data", *TRAIN], "--volume: 'data' is not FOLDER:/PATH"),
        ([*IMAGE, "--volume", "nope:/data", *TRAIN], "--volume: there is no nope here; create it"),
        ([*IMAGE, "--program", " ", *TRAIN], "--program: is empty; leave it out"),
        ([*IMAGE, "--program", "a 'b", *TRAIN], '--program: "a \'b" is not a command: No closing quotation'),
        ([*IMAGE, "--volume", "..:/", *TRAIN], "--volume: '..:/' is not FOLDER:/PATH"),
        ([*IMAGE, "--nodes", "2", "plan", "digits"], "--nodes: 2, but `lockstep plan` runs on one node"),
        ([*IMAGE, "--sweep", "optim.lr=1,2", *TRAIN], "--sweep: needs a queue with job arrays, and docker"),
        ([*IMAGE, "train", "digits", "run.folder=/elsewhere/a"], "run.folder: would be lost with the container"),
        ([*IMAGE, "train", "digits", "run.folder=../a"], "run.folder: would be lost with the container"),
        ([*IMAGE, *TRAIN, "checkpoint.folder=/c/d"], "checkpoint.folder: would be lost with the container; give"),
        ([*IMAGE, "--nodes", "3", *TRAIN, "--ranks", "3", "parallel.tensor=2"], "parallel"),
        ([*IMAGE, "train", "digits", "--optim.lrr", "1"], "--optim.lrr: unknown key; did you mean lr?"),
    ],
)
def test_mistakes_are_refused_here(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words).startswith(message)


# --- submitting -----------------------------------------------------------------------------------------------------


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Launch a job, and return its name."""
    assert main([*LAUNCH, *words]) == 0
    match = re.search(r"docker job (\S+);", capsys.readouterr().err)
    assert match
    return match[1]


def test_an_image_is_built_and_a_job_started_with_a_secret(
    engine: Program, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "Dockerfile").touch()
    number = launched(capsys, "--nodes", "2", *TRAIN)
    assert re.fullmatch("digits-[0-9a-f]{6}", number)
    calls = engine.calls()
    file = here / "runs/a/launch/compose.yaml"
    compose = f"compose {shlex.quote(f'--file={file}')}"
    assert [call.words for call in calls] == [
        "compose ls", f"{compose} build node0", f"{compose} up --detach --no-build",
    ]  # fmt: skip
    token = calls[-1].token
    assert re.fullmatch("[0-9a-f]{64}", token)
    written = [path for path in here.rglob("*") if path.is_file()]
    assert {path.name for path in written} == {"Dockerfile", "compose.yaml", "job.json"}
    assert all(token not in path.read_text() for path in written)
    assert yaml.safe_load(file.read_text())["name"] == number


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("compose ls", "docker: unknown command: docker compose"),
        ("compose build", "failed to solve: no such stage"),
        ("compose up", 'could not select device driver "nvidia"'),
    ],
)
def test_nothing_is_left_when_a_call_fails(
    call: str, error: str, engine: Program, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "Dockerfile").touch()
    engine.answer({call: [("", error)]})
    assert main([*LAUNCH, *TRAIN]) == 1
    assert error in capfd.readouterr().err
    down = engine.calls()[-1].words.endswith(" down")
    assert down is ("build" in call or "up" in call)
    assert not Path("runs/a").exists()


def test_what_can_not_be_removed_is_named(engine: Program, capfd: pytest.CaptureFixture[str]) -> None:
    engine.answer({"compose up": [("", "no space left")], f"{JOB} down": [("", "no connection")]})
    assert main([*LAUNCH, *IMAGE, *TRAIN]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r": docker compose --project-name \S+ down", last)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_submission_leaves_nothing(number: signal.Signals, engine: Program, here: Path) -> None:
    engine.answer({"compose up": [("stop", "")]})
    done = run_lockstep(*LAUNCH, *IMAGE, *TRAIN, PATH=os.environ["PATH"], STOP=str(int(number)))
    assert done.returncode == 130, done
    assert re.search(r"--project-name=digits-\w+ .* down$", engine.calls()[-1].words)


def test_where_docker_is_not_installed(
    engine: Program, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([*LAUNCH, *IMAGE, *TRAIN]) == 1
    assert gives(capsys.readouterr().err, "docker", "Compose", "--dry-run")
    assert not Path("runs/a").exists()


# --- following ------------------------------------------------------------------------------------------------------


JOB = "compose --project-directory=/"


def container(node: int, state: str, code: int = 0) -> dict[str, Any]:
    return {"Service": f"node{node}", "State": state, "ExitCode": code}


def listed(*those: dict[str, Any]) -> tuple[str, str]:
    return "".join(f"{json.dumps(each)}\n" for each in those), ""


def test_a_job_is_followed_to_its_end_which_is_kept(
    engine: Program, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = launched(capsys, *IMAGE, "--nodes", "2", *TRAIN)
    run, ends = (
        listed(container(1, "running"), container(0, "running")),
        [container(0, "exited"), container(1, "exited")],
    )
    engine.answer(
        {
            f"{JOB} ps": [run, run, (json.dumps(ends), "")],
            f"{JOB} logs --follow --no-log-prefix --since=0 node0": [("step 1\nstep 2\n", "")],
            f"{JOB} logs --follow": [("done\x1b\n", ""), ("", "")],
            f"{JOB} logs --no-color": [("node0 | step 1\n", "")],
        }
    )
    assert main([*LAUNCH, "follow", "runs/a"]) == 0
    written = capsys.readouterr()
    assert written.out == "step 1\nstep 2\ndone\\x1b\n"
    assert written.err.splitlines() == [
        f"Docker {number}: 2 of 2 nodes running",
        f"Docker {number}: ended, exit code 0",
    ]
    assert engine.calls()[-1].words == f"compose --project-name={number} --project-directory=/ down"
    assert (here / "runs/a/launch/docker.log").read_text() == "node0 | step 1\n"
    before = len(engine.calls())
    assert main([*LAUNCH, "status", "runs/a"]) == 0
    assert main([*LAUNCH, "follow", "runs/a"]) == 0
    assert capsys.readouterr().out == f"Docker {number}: ended, exit code 0\n"
    assert len(engine.calls()) == before, "nothing is left to ask Docker for"


@pytest.mark.parametrize(
    ("ends", "code", "text"),
    [
        ([0, 0], 0, "ended, exit code 0"),
        ([2, 2], 2, "ended, exit code 2"),
        ([75, 75], 75, "ended, exit code 75"),
        ([130, 130], 130, "ended, exit code 130"),
        ([1, 137], 1, "ended, exit code 1 (node1 ended with exit code 137)"),
        ([75, 1], 1, "ended, exit code 1"),
        ([75, 0], 75, "ended, exit code 75"),
    ],
)
def test_a_job_has_the_exit_code_of_its_run(
    ends: list[int], code: int, text: str, engine: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer({f"{JOB} ps": [listed(*(container(node, "exited", code) for node, code in enumerate(ends)))]})
    assert main([*LAUNCH, "follow", "digits-1"]) == code
    assert capsys.readouterr().err == f"Docker digits-1: {text}\n"
    assert not any("down" in call.words for call in engine.calls()), "its folder isn't known here: nothing is lost"


def test_logs_that_can_not_be_kept_leave_the_containers(
    engine: Program, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(capsys, *IMAGE, *TRAIN)
    engine.answer({f"{JOB} ps": [listed(container(0, "exited"))], f"{JOB} logs": [("", "no space left on device")]})
    assert main([*LAUNCH, "status", "runs/a"]) == 1
    assert "no space left on device" in capsys.readouterr().err
    assert not engine.calls()[-1].words.endswith(" down")


def test_a_job_that_is_canceled_saves_first(engine: Program, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = launched(capsys, *IMAGE, *TRAIN)
    engine.answer({f"{JOB} ps": [listed(container(0, "running")), listed(container(0, "exited", 75))]})
    assert main([*LAUNCH, "cancel", "runs/a"]) == 0
    verbs = [call.words.split()[3] for call in engine.calls()[-5:]]
    assert verbs == ["ps", "stop", "ps", "logs", "down"]
    assert main([*LAUNCH, "cancel", "runs/a"]) == 2
    assert gives(capsys.readouterr().err, "nothing to cancel", number, "exit code 75")


def test_a_second_job_of_a_run_is_refused_while_the_first_runs(
    engine: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(capsys, *IMAGE, *TRAIN)
    engine.answer({f"{JOB} ps": [listed(container(0, "running"))]})
    assert main([*LAUNCH, *IMAGE, *TRAIN]) == 2
    assert "this run has a job already" in capsys.readouterr().err
    engine.answer({})
    launched(capsys, *IMAGE, *TRAIN)


def test_a_followed_job_that_vanishes_was_canceled(engine: Program, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer({f"{JOB} ps": [listed(container(0, "running")), ("", "")]})
    assert main([*LAUNCH, "follow", "digits-1"]) == 130
    assert main([*LAUNCH, "status", "digits-1"]) == 2
    assert gives(capsys.readouterr().err, "knows no", "digits-1")
    assert main([*LAUNCH, "status", "a/b c"]) == 2


# --- the page -------------------------------------------------------------------------------------------------------


def page_commands() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "docker.md").read_text()
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("lockstep launch docker --")]
    return [[word for word in words[3:] if word not in ("--dry-run", "--follow")] for words in lines]


@pytest.mark.parametrize("words", page_commands(), ids=lambda words: " ".join(words)[:40])
def test_each_command_of_the_page_gives_a_valid_compose_file(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    (here / "Dockerfile").touch()
    (here / "data").mkdir()
    assert main([*LAUNCH, "--dry-run", *words]) == 0
    documents = re.split(r"(?m)^(?=name: )", capsys.readouterr().out)
    assert problem_of(yaml.safe_load(documents[-1].partition("# What isn't copied")[0])) == ""
