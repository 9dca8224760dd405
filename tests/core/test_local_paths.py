"""A URL is refused wherever a path is expected; as a path it would be a folder `s3:` in the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import small

import lockstep
from lockstep.cli.main import main
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.core.local_paths import url_refusal
from lockstep.interop.importing import nested

_HUGGING_FACE = {"kind": "huggingface", "task": "causal-lm", "pretrained": "a/b"}
_SECTIONS = {
    "model.init_from": {},
    "model.target": {},
    "data.train.target": {},
    "data.train.collate": {},
    "parallel.deepspeed.config": {},
    "model.pretrained": {"model": _HUGGING_FACE},
    "data.train.name": {"data": {"train": {"kind": "huggingface", "name": "a/b"}}},
    "data.train.tokenizer": {"data": {"train": {"kind": "huggingface", "name": "a/b"}}},
    "objective.target": {"objective": {"kind": "custom", "target": "a.py:B"}},
}


@pytest.mark.parametrize("key", _SECTIONS)
def test_every_key_that_holds_a_path_refuses_a_url(key: str) -> None:
    config = {**small.config(), **_SECTIONS[key]}
    validate(config)
    with pytest.raises(ConfigError, match="s3://bucket/x is a URL") as raised:
        validate(config, nested({key: "s3://bucket/x"}))
    assert [problem.key for problem in raised.value.problems] == [key]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--checkpoint.folder", "file:///x", "--launch.device", "cpu"],
        ["ckpt", "ls", "file:///x"],
        ["ckpt", "import", "a.pt", "s3://bucket/x"],
        ["export", "runs/x", "--to", "hdfs://host/x"],
        ["report", "runs/x", "--output", "s3://bucket/x.html"],
        ["data", "prepare", "a.txt", "--tokenizer", "bytes", "--output", "dbfs:/x"],
        ["data", "prepare", "https://host/a.txt", "--tokenizer", "bytes", "--output", "x"],
    ],
    ids=" ".join,
)
def test_a_url_on_the_command_line_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "is a URL" in capsys.readouterr().err
    assert not [entry for entry in tmp_path.rglob("*") if entry.name.endswith(":")]


def test_a_session_of_the_library_saves_to_no_file_url() -> None:
    with lockstep.session(small.config()) as session, pytest.raises(ConfigError, match="is a URL"):
        session.checkpoints("file:///x")


@pytest.mark.parametrize("text", ["runs/x", "/runs/x", "C:/runs", "a:b", "package.mod:Name", "x.py:Name", "org/name"])
def test_other_texts_are_not_refused(text: str) -> None:
    assert url_refusal(text) is None


def test_a_file_url_is_offered_as_a_path() -> None:
    assert url_refusal("file:///data/x") == "file:///data/x is a URL; write only the path: /data/x"
