"""No secret of the environment, the command line or the config is written to a run's folder, and the run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.commands import run_lockstep

from lockstep.config import known_runs
from lockstep.config.loading import load, validate
from lockstep.config.writing import hidden_in, to_public
from lockstep.core import secrets

# A value for each; none may be found in what a run leaves behind.
VARIABLES = {
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.c2lnbmF0dXJl",
    "HF_TOKEN": "value-of-hf-token",
    "TORCH_PASS": "value-of-pass",
    "NCCL_PW": "value-of-pw",
    "SLURM_PAT": "value-of-pat",
    "CUDA_BEARER": "value-of-bearer",
    "HF_ENDPOINT": "https://value-of-userinfo@hub.example/",
    "OMP_CREDENTIALS": "value-of-credentials",
    "WANDB_API_KEY": "value-of-api-key",
}
CODE = """
import os
from torch import nn

class Net(nn.Linear):
    def __init__(self, api_key, url):
        super().__init__(64, 10)
        assert api_key == "value-of-argument", api_key
        assert url == "https://me:value-of-url-password@example.org/weights", url
        assert os.environ["HF_SETTING"] == "value-of-setting"
        for part in ("in parts: value-of-", "api-key", "\\n"):
            print(part, end="", flush=True)
        print("the key is", os.environ["WANDB_API_KEY"], "and", url)

    def forward(self, images):
        return super().forward(images.flatten(1))
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "net.py").write_text(CODE)
    arguments = {"api_key": "value-of-argument", "url": "https://me:value-of-url-password@example.org/weights"}
    values = {
        "description": "for a, api_key=value-of-description of b",
        "model": {"kind": "custom", "target": "net.py:Net", "arguments": arguments},
        "objective": {"kind": "classification"},
        "data": {"train": {"kind": "digits"}},
        "launch": {
            "device": "cpu",
            "ranks": 2,
            "environment": {"HF_SETTING": "value-of-setting", "NCCL_DEBUG": "WARN"},
        },
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": 2, "folder": "run"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def _left(folder: Path) -> dict[str, list[str]]:
    """Return the secrets in each file, by path."""
    secrets = {}
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        held = [value for value in ("value-of-", VARIABLES["SLURM_JWT"]) if value.encode() in data]
        if held:
            secrets[path.name] = held
    return secrets


def test_no_secret_is_left_behind_and_the_run_resumes(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_lockstep("train", "config.json", "--launch.environment.MORE", "value-of-more", cwd=config)
    assert first.returncode == 0, first.stderr
    assert "the key is value-of-api-key" in first.stdout, "the terminal is the user's own"
    run = config / "run"
    assert _left(run) == {}
    text = (run / "config.yaml").read_text()
    assert "HF_SETTING: (hidden)" in text
    assert "description: for a, api_key=(hidden) of b" in text
    assert json.loads((run / "environment.json").read_text())["variables"]["HF_SETTING"] == "(hidden)"
    assert "NCCL_DEBUG: WARN" in text
    assert "url: https://(hidden)@example.org/weights" in text
    assert "in parts: (hidden)\n" in (run / "logs" / "rank-1.log").read_text()
    assert "the key is (hidden) and https://(hidden)@example.org" in (run / "logs" / "rank-1.log").read_text()

    again = run_lockstep("train", "run", "run.steps=3", cwd=config)
    assert again.returncode == 0, again.stderr
    assert "resumes from step 2" in again.stdout
    assert _left(run) == {}
    shown = run_lockstep("config", "show", "run", cwd=config)
    assert "value-of" not in shown.stdout

    monkeypatch.setenv("XDG_STATE_HOME", str(config / "another machine"))
    unknown = run_lockstep("train", "run", "run.steps=4", "--trust-run", cwd=config)
    assert unknown.returncode == 2
    assert "5 problems in the config" in unknown.stderr
    for key in ("model.arguments.api_key", "model.arguments.url", "launch.environment.HF_SETTING"):
        assert f"  {key}: is a secret; its value isn't kept in a run's folder" in unknown.stderr
    monkeypatch.setenv("MORE", "value-of-more")
    given = [
        "--description=x",
        "--launch.environment.HF_SETTING=value-of-setting",
        "--model.arguments.api_key=value-of-argument",
        "--model.arguments.url=https://me:value-of-url-password@example.org/weights",
    ]
    resumed = run_lockstep("train", "run", "run.steps=4", "--trust-run", *given, cwd=config)
    assert resumed.returncode == 0, resumed.stderr
    assert _left(run) == {}
    assert run_lockstep("train", "run", "run.steps=5", cwd=config).returncode == 0, "known from then on"


def test_what_is_remembered_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    known_runs.remember("a", {"configs": {"x": 1}})
    file = tmp_path / "state" / "lockstep" / "runs" / "a.json"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert known_runs.configs_of("a") == {"x": 1}
    for mode in (0o702, 0o720, 0o704):
        file.parent.chmod(mode)
        assert known_runs.configs_of("a") == {}, "another user could have written or read it"
    file.parent.chmod(0o700)
    file.write_text("[" * 100_000)
    assert known_runs.configs_of("a") == {}


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(known_runs, "_MOST_RUNS", 5)
    for number in range(9):
        known_runs.remember(str(number), {"configs": {"x": number}})
    assert len(list((tmp_path / "lockstep" / "runs").iterdir())) == 5
    assert known_runs.configs_of("8") == {"x": 8}


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    known_runs.remember("a", {"configs": {"x": 1}})
    assert known_runs.configs_of("a") == {}


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JWT",
        "MY_PAT",
        "DB_PASS",
        "DB_PW",
        "BEARER",
        "API_KEY",
        "apiKey",
        "SECRET",
        "X_TOKEN",
        "CREDENTIALS",
        "COOKIE",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secrets.hidden_variable(name, "x") == "(hidden)"


@pytest.mark.parametrize(
    "name",
    ["PATH", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "SLURM_JOB_ID", "OMP_NUM_THREADS", "KEYBOARD", "PWD", "tokenizer"],
)
def test_names_of_none(name: str) -> None:
    assert secrets.hidden_variable(name, "x") == "x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("clone https://me:pw@host/x now", "clone https://(hidden)@host/x now"),
        ("https://ghp_aaaaaaaaaaaaaaaaaaaa@github.com", "https://(hidden)@github.com"),
        ("s3://b/k?a=1&X-Amz-Signature=abc&b=2", "s3://b/k?a=1&X-Amz-Signature=(hidden)&b=2"),
        ("hf_" + "aB3" * 12, "(hidden)"),
        ("key=AKIAIOSFODNN7EXAMPLE,", "key=(hidden),"),
        ("sk-proj-" + "a1" * 20, "(hidden)"),
        ("for me, api_key=Xy12345678, of you", "for me, api_key=(hidden), of you"),
        ('{"client-secret": "a1b2c3d4e5"}', '{"client-secret": "(hidden)"}'),
        ("a password: forgotten", "a password: forgotten"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer (hidden)"),
        (VARIABLES["SLURM_JWT"], "(hidden)"),
        *((text, text) for text in ("http://localhost:8080/a@b", "hf_hub", "sk-learn", "task-force-1-of-all-things-x")),
    ],
)
def test_shapes_of_secrets(text: str, shown: str) -> None:
    assert secrets.without_secrets(text) == shown


def test_keys_of_configs_are_mostly_no_secrets() -> None:
    """Columns and tokens have such names; their values are words."""
    arguments = {
        "key": "input_ids",
        "pad_token": "<pad>",
        "text_key": "prompt",
        "password": "x",
        "list": ["https://a:b@c"],
    }
    config = validate({
        "model": {"kind": "custom", "target": "a:B", "arguments": arguments},
        "data": {"train": {"kind": "digits"}},
        "run": {"steps": 1},
    }).config  # fmt: skip
    assert [path[2:] for path, _ in hidden_in(config)] == [("password",), ("list", "0")]
    assert to_public(config)["model"]["arguments"] | {} == {
        **arguments,
        "password": "(hidden)",
        "list": ["https://(hidden)@c"],
    }


def test_a_copied_config_with_a_hidden_value_is_refused(tmp_path: Path) -> None:
    from lockstep.config.trust import approved
    from lockstep.core.errors import ConfigError

    (tmp_path / "copy.yaml").write_text(
        "{model: {kind: image-classifier}, data: {train: {kind: digits}}, run: {steps: 1}, "
        "launch: {environment: {NOT_SET_HERE: (hidden)}}}"
    )
    with pytest.raises(
        ConfigError, match=r"set NOT_SET_HERE in your environment, or give --launch.environment.NOT_SET"
    ):
        approved(load([tmp_path / "copy.yaml"], environ={}), trusted=False)
