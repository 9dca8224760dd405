"""Token files are written by `lockstep data prepare` and read as windows or whole documents."""

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.failures import fails
from kit.worlds import served

from lockstep.config.schema import Tokens
from lockstep.core import cache_files
from lockstep.core.errors import ConfigError
from lockstep.data import prepare as preparation
from lockstep.data.prepare import prepare
from lockstep.data.sources import open_source
from lockstep.data.tokens import tokenizer_name

END = 256


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number} " + "é" * number)
    return folder


def prepared(texts: Path, **options) -> Path:
    output = texts.parent / "tokens"
    prepare([str(texts / "*.txt")], output, tokenizer="bytes", **options)
    return output


def section(folder: Path, **options) -> Tokens:
    return Tokens(kind="tokens", folder=str(folder), **options)


def stream_of(texts: Path) -> list[int]:
    return [token for path in sorted(texts.iterdir()) for token in [*path.read_bytes(), END]]


def test_windows_are_the_documents_joined_by_end_tokens(texts):
    source = open_source(section(prepared(texts), length=16), task=None, tokenizer=None)
    stream = stream_of(texts)
    assert source.facts.samples == (len(stream) - 1) // 16
    assert source.facts.vocabulary == 257
    assert source.facts.bytes_per_token == pytest.approx((len(stream) - 30) / len(stream))
    batch = source.fetch(np.array([3, 0]))
    assert batch.inputs["tokens"].tolist() == [stream[48:64], stream[0:16]]
    assert batch.targets.tolist() == [stream[49:65], stream[1:17]]
    assert batch.targets.dtype == torch.int64
    assert (batch.samples, batch.tokens) == (2, 32)


def test_models_of_the_transformers_library_get_aligned_labels(texts):
    source = open_source(section(prepared(texts), length=16), task="causal-lm", tokenizer=None)
    batch = source.fetch(np.array([1]))
    assert batch.inputs["input_ids"].tolist() == batch.targets.tolist() == [stream_of(texts)[16:32]]


@settings(deadline=None, max_examples=20)
@given(length=st.integers(2, 60), aligned=st.booleans())
def test_targets_of_whole_documents_never_cross_documents(prepared_once, length, aligned):
    folder, texts = prepared_once
    task = "causal-lm" if aligned else None
    source = open_source(section(folder, length=length, documents="whole"), task=task, tokenizer=None)
    batch = source.fetch(np.arange(source.facts.samples))
    (inputs,) = batch.inputs.values()
    documents = [[*path.read_bytes(), END] for path in sorted(texts.iterdir())]
    assert batch.tokens == sum(map(len, documents))
    pairs = set()
    for row, targets in zip(inputs.tolist(), batch.targets.tolist(), strict=True):
        if aligned:  # the objective shifts them
            row, targets = row[:-1], targets[1:]
        pairs |= {(token, target) for token, target in zip(row, targets, strict=True) if target != -100}
    assert pairs <= {pair for document in documents for pair in pairwise(document)}
    cuts = sum(-(-len(document) // length) for document in documents)
    lost_at_the_start = 0 if not aligned else sum(int(row[0]) != -100 for row in batch.targets)
    assert int((batch.targets != -100).sum()) - lost_at_the_start == batch.tokens - cuts


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory) -> tuple[Path, Path]:
    texts = tmp_path_factory.mktemp("whole") / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number:02}.txt").write_text("abcdefghij"[: number % 7 + 1] * (1 + number % 4))
    return prepared(texts), texts


def test_every_nth_document_is_held_out(texts):
    folder = prepared(texts, held_out=10)
    kept = np.fromfile(folder / "train.tokens", np.uint16)
    held = np.fromfile(folder / "held-out.tokens", np.uint16)
    assert (kept == END).sum() == 27
    assert (held == END).sum() == 3
    assert bytes(held[: list(held).index(END)].astype(np.uint8)) == (texts / "09.txt").read_bytes()
    assert np.fromfile(folder / "held-out.documents", np.int64)[-1] == len(held)


def test_rows_of_json_lines_are_documents(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"body": "ab"}\n\n{"body": "c"}\n')
    headers = prepare([str(tmp_path / "rows.jsonl")], tmp_path / "out", tokenizer="bytes", column="body")
    assert np.fromfile(tmp_path / "out/train.tokens", np.uint16).tolist() == [97, 98, END, 99, END]
    assert (headers["train"].documents, headers["train"].tokens) == (2, 5)
    with fails(ConfigError, "rows.jsonl:1", "column text"):
        prepare([str(tmp_path / "rows.jsonl")], tmp_path / "out", tokenizer="bytes")


def test_a_failed_preparation_keeps_the_old_split_and_leaves_no_files(texts):
    folder = prepared(texts)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with fails(ConfigError, texts / "gone.txt"):
        prepare([str(texts / "*.txt"), str(texts / "gone.txt")], folder, tokenizer="bytes")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_fingerprint_depends_on_content_and_length(texts):
    first = open_source(section(prepared(texts), length=16), task=None, tokenizer=None).fingerprint
    assert open_source(section(prepared(texts), length=16), task=None, tokenizer=None).fingerprint == first
    assert open_source(section(prepared(texts), length=8), task=None, tokenizer=None).fingerprint != first
    (texts / "07.txt").write_text("another document")
    assert open_source(section(prepared(texts), length=16), task=None, tokenizer=None).fingerprint != first


def test_missing_folders_splits_and_short_files_are_refused(texts, tmp_path):
    folder = prepared(texts)
    assert tokenizer_name(str(folder), "train") == "bytes"
    for wrong, message in [
        (section(tmp_path / "none"), "there is no folder .*; write it with `lockstep data prepare`"),
        (section(folder, split="test"), "has no split test; it has train"),
        (section(folder, length=10_000), "too few for a sample of length 10000; set 1249 at most"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_source(wrong, task=None, tokenizer=None)


def test_a_missing_folder_is_reported_with_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fails(ConfigError, tmp_path / "tokens"):
        open_source(section("tokens"), task=None, tokenizer=None)


def test_a_truncated_file_is_refused(texts):
    folder = prepared(texts)
    data = (folder / "train.tokens").read_bytes()
    (folder / "train.tokens").write_bytes(data[:-2])
    with fails(ConfigError, f"{len(data) - 2} bytes", len(data)):
        open_source(section(folder, length=16), task=None, tokenizer=None)
    (folder / "train.json").write_text(json.dumps({"format": 1}))
    with fails(ConfigError, "train.json", "header"):
        open_source(section(folder, length=16), task=None, tokenizer=None)


# --- several writers, and disks that are full -----------------------------------------------------------------------


def meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do something once, between the first document of the first preparation and the next one."""
    documents, actions = preparation._documents, [action]

    def interrupted(*inputs: object) -> Iterator[str]:
        for document in documents(*inputs):
            yield document
            if actions:
                actions.pop()()

    monkeypatch.setattr(preparation, "_documents", interrupted)


def test_a_preparation_waits_for_another_one_of_the_folder(texts, monkeypatch):
    output, others = texts.parent / "tokens", [texts / "29.txt"]
    other = threading.Thread(target=lambda: others.append(prepare([str(others[0])], output, tokenizer="bytes")))

    def start() -> None:
        other.start()
        other.join(0.2)
        assert not list(output.glob("train.json"))

    meanwhile(monkeypatch, start)
    assert prepare([str(texts / "*.txt")], output, tokenizer="bytes")["train"].documents == 30
    other.join()
    assert others[1]["train"].documents == 1
    assert np.fromfile(output / "train.tokens", np.uint16).tolist() == [*(texts / "29.txt").read_bytes(), END]
    assert {path.name for path in output.iterdir()} == {"train.json", "train.tokens", "train.documents"}


def _prepare_without_locks(texts: Path) -> None:
    cache_files._try_lock = lambda handle: True
    prepared(texts)


def test_preparations_on_a_file_system_without_locks_write_their_own_drafts(texts, monkeypatch):
    monkeypatch.setattr(cache_files, "_try_lock", lambda handle: True)

    def prepare_elsewhere() -> None:
        process = served().Process(target=_prepare_without_locks, args=(texts,))
        process.start()
        process.join(60)
        assert process.exitcode == 0

    meanwhile(monkeypatch, prepare_elsewhere)
    folder = prepared(texts)
    assert np.fromfile(folder / "train.tokens", np.uint16).tolist() == stream_of(texts)
    assert {path.name for path in folder.iterdir()} == {"train.json", "train.tokens", "train.documents"}


def test_drafts_of_a_preparation_that_was_killed_are_removed(texts):
    folder = texts.parent / "tokens"
    folder.mkdir()
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    (folder / f".prepare@{socket.gethostname()}@{process}.part").mkdir()
    (folder / f".prepare@{socket.gethostname()}@{os.getppid()}.part").mkdir()
    prepared(texts)
    assert len(list(folder.glob(".prepare@*.part"))) == 1


def test_a_full_disk_is_reported_with_its_file_and_leaves_the_old_split(texts):
    folder = prepared(texts)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (texts / "30.txt").write_text("x" * 3_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=rf"{folder}/.*/train.tokens: File too large; name a folder with space"):
            prepared(texts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_no_split_is_replaced_unless_all_are_complete(texts):
    folder = prepared(texts, held_out=10)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with fails(ConfigError, "split held-out"):
        prepared(texts, held_out=40)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("blocked", ["the folder", "the split"])
def test_a_folder_that_can_not_be_written_is_named(blocked, texts):
    folder = texts.parent / "tokens"
    folder.write_text("x") if blocked == "the folder" else (folder / "train.tokens").mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"^{folder}"):
        prepared(texts)
