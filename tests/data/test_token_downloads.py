"""Token files in an object store are downloaded once, verified, and read as local ones."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import s3
from kit.failures import fails
from kit.s3 import BUCKET, Fault
from kit.worlds import served

from lockstep.config.schema import Tokens
from lockstep.core import cache_files
from lockstep.core.errors import ConfigError
from lockstep.data import tokens as token_files
from lockstep.data.prepare import prepare
from lockstep.data.sources import open_source
from lockstep.data.tokens import tokenizer_name

ADDRESS = f"s3://{BUCKET}/books"


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    prepare([str(tmp_path / "text.txt")], tmp_path / "books", tokenizer="bytes")
    with s3.serving() as server, s3.proxied(server) as between:
        for name, value in s3.environment(between.endpoint).items():
            monkeypatch.setenv(name, value)
        for file in (tmp_path / "books").iterdir():
            s3.client(server).put_object(Bucket=BUCKET, Key=f"books/{file.name}", Body=file.read_bytes())
        yield between


def test_a_split_is_downloaded_once_and_verified(proxy: s3.Proxy, tmp_path: Path) -> None:
    local = open_source(Tokens(kind="tokens", folder=str(tmp_path / "books"), length=16), task=None, tokenizer=None)
    section = Tokens(kind="tokens", folder=ADDRESS, length=16)
    cuts = [Fault(r"GET .*train.tokens", "lost"), Fault(r"GET .*train.documents", "503")]
    proxy.plan(*cuts)
    remote = open_source(section, task=None, tokenizer=None)
    assert [fault.made for fault in cuts] == [1, 1]
    assert remote.fingerprint == local.fingerprint
    indices = torch.arange(5).numpy()
    assert torch.equal(remote.fetch(indices).inputs["tokens"], local.fetch(indices).inputs["tokens"])
    assert tokenizer_name(ADDRESS, "train") == "bytes"
    proxy.plan()
    open_source(section, task=None, tokenizer=None)
    assert not [line for line in proxy.requests if ".tokens" in line]

    client = s3.client(proxy.endpoint)
    stored = client.get_object(Bucket=BUCKET, Key="books/train.tokens")["Body"].read()
    client.put_object(Bucket=BUCKET, Key="books/train.tokens", Body=bytes([stored[0] ^ 1]) + stored[1:])
    for entry in (tmp_path / "cache" / "tokens").glob("*/*"):
        entry.unlink()
    for entry in (tmp_path / "cache" / "tokens").iterdir():
        entry.rmdir() if entry.is_dir() else entry.unlink()
    with fails(ConfigError, "split train", ADDRESS, "train.json"):
        open_source(section, task=None, tokenizer=None)
    assert not [entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]
    with fails(ConfigError, "split other", "train"):
        open_source(Tokens(kind="tokens", folder=ADDRESS, split="other", length=16), task=None, tokenizer=None)


def _download_without_locks(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    cache_files._try_lock = lambda handle: True
    open_source(Tokens(kind="tokens", folder=ADDRESS, length=16), task=None, tokenizer=None)


def test_downloads_on_a_file_system_without_locks_do_not_disturb_each_other(
    proxy: s3.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "_try_lock", lambda handle: True)
    download, others = token_files._download_file, []

    def interrupted(*arguments: Any) -> None:
        download(*arguments)
        if not others:
            environment = {**s3.environment(proxy.endpoint), cache_files.CACHE: str(tmp_path / "cache")}
            others.append(served().Process(target=_download_without_locks, args=(environment,)))
            others[0].start()
            others[0].join(60)

    monkeypatch.setattr(token_files, "_download_file", interrupted)
    open_source(Tokens(kind="tokens", folder=ADDRESS, length=16), task=None, tokenizer=None)
    assert others[0].exitcode == 0
    assert len([entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]) == 1


def test_a_full_disk_is_reported_with_its_file_and_nothing_is_left(proxy: s3.Proxy, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cache/tokens/.*: File too large; set LOCKSTEP_CACHE to a folder with"):
            open_source(Tokens(kind="tokens", folder=ADDRESS, length=16), task=None, tokenizer=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]
