"""Checkpoints in a bucket: a real server on loopback, the real client, and faults on the wire between them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import s3, small
from kit.commands import run_lockstep, start_lockstep
from kit.failures import fails, gives
from kit.s3 import BUCKET, Fault
from kit.storing import rank_states, save

import lockstep
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.reading import verify
from lockstep.cli.main import main
from lockstep.core.errors import ConfigError
from lockstep.stores.addresses import checked_address
from lockstep.stores.blobs import BlobStore
from lockstep.stores.buckets import Bucket, open_store

_MIB = 2**20
_CALLS = (
    "POST .*uploads", "PUT .*partNumber=2", "POST .*uploadId=", "PUT .*/small", "PUT .*/new", "GET .*list-type=2",
    "HEAD", "GET .*/large", "PUT .*/copied", "POST .*delete",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3.serving() as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    with s3.proxied(server) as between:
        for name, value in s3.environment(between.endpoint).items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}"


def _uploads(server: str) -> list[Any]:
    return list(s3.client(server).list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))


# --- calls ----------------------------------------------------------------------------------------------------------


def _use_every_call(store: BlobStore) -> None:
    data = memoryview(os.urandom(12 * _MIB))
    store.write("large", data[: 7 * _MIB], data[7 * _MIB :])
    store.write("small", data[:5])
    store.write_new("new", data[:3])
    with pytest.raises(FileExistsError):
        store.write_new("new", data[:4])
    store.copy("small", "copied")
    assert store.sizes("") == {"copied": 5, "large": 12 * _MIB, "new": 3, "small": 5}
    assert store.sizes("la") == {"large": 12 * _MIB}
    assert store.size("large") == 12 * _MIB
    into = bytearray(2 * _MIB)
    store.read("large", 6 * _MIB + 1, memoryview(into))
    assert into == data[6 * _MIB + 1 : 8 * _MIB + 1]
    with pytest.raises(OSError, match=r"ends at byte 5|fewer bytes"):
        store.read("small", 3, memoryview(bytearray(10)))
    store.delete(["new", "small", "large", "copied"])
    assert store.sizes("") == {}


@pytest.mark.parametrize("kind", ["500", "503", "cut", "lost"])
def test_every_call_is_repeated_after_a_fault(kind: Any, proxy: s3.Proxy, address: str, server: str) -> None:
    faults = [Fault(pattern, kind) for pattern in _CALLS]
    proxy.plan(*faults)
    _use_every_call(Bucket(address, 10.0, 5 * _MIB))
    assert [fault.pattern for fault in faults if not fault.made] == []
    left = _uploads(server)
    assert len(left) == (kind == "lost")  # the one whose name was lost, which only a rule of the bucket can delete
    for upload in left:
        s3.client(server).abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])


def test_a_server_that_is_started_again_is_waited_for(server: str, proxy: s3.Proxy, address: str) -> None:
    store = Bucket(address, 30.0)
    assert store.sizes("") == {}
    port = int(proxy.endpoint.rpartition(":")[2])
    proxy.close()
    with fails(OSError, "not reached", "0.2 s"):
        Bucket(address, 0.2).sizes("")
    again: list[s3.Proxy] = []
    restart = threading.Timer(0.5, lambda: again.append(s3.Proxy(server, port)))
    restart.start()
    try:
        assert store.sizes("") == {}
    finally:
        restart.join()
        again[0].close()


@pytest.mark.parametrize("pattern", ["PUT .*partNumber=2", "POST .*uploadId="])
def test_an_upload_that_fails_for_too_long_is_aborted(pattern: str, proxy: s3.Proxy, address: str, server: str) -> None:
    proxy.plan(Fault(pattern, "503", times=1000))
    with fails(OSError, "0.3 s", "SlowDown"):
        Bucket(address, 0.3, 5 * _MIB).write("large", memoryview(bytes(6 * _MIB)))
    assert any(line.startswith("DELETE") for line in proxy.requests)
    assert _uploads(server) == []


# --- saves ----------------------------------------------------------------------------------------------------------


def _states(value: float) -> Sequence[Any]:
    return rank_states({"model.a": torch.full((64, 8), value), "model.b": torch.full((7,), value)}, ranks=2, dim=0)


def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_no_objects(proxy: s3.Proxy, address: str) -> None:
    storage = ObjectStorage(Bucket(address, 0.2))
    assert save(storage, _states(1.0), 1) == []
    for pattern in ("PUT .*rank-00001.safetensors", "PUT .*rank-00001.json", "PUT .*manifest.json"):
        proxy.plan(Fault(pattern, "500", times=1000))
        (failure,) = save(storage, _states(2.0), 2)
        assert gives(failure, "0.2 s", "InternalError: planned")
        proxy.plan()
        assert storage.names() == ["step-00000001"]
        assert not open_store(address).sizes("step-00000002/")
    assert verify(storage, "step-00000001").fault is None
    assert save(storage, _states(2.0), 2) == []
    assert storage.names() == ["step-00000001", "step-00000002"]


# --- runs -----------------------------------------------------------------------------------------------------------

_TRAIN = (
    "train", "digits", "--run.epochs=null", "--monitor.progress=plain", "--monitor.tensorboard=false",
    "--evaluation.every=null", "--evaluation.at_end=false", "--launch.device=cpu", "--checkpoint.every=2 steps",
    "--model.layers=1", "--model.width=8",
)  # fmt: skip


def test_a_run_is_saved_and_resumed_under_another_strategy_and_leaves_no_secret(
    proxy: s3.Proxy, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*_TRAIN, "--run.folder=run", f"--checkpoint.folder={address}"]
    first = run_lockstep(*words, "--run.steps=4", "--ranks=2", "--parallel.strategy=fsdp", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = run_lockstep(*words, "--run.steps=6", "--ranks=1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resumes from step 4" in again.stdout + again.stderr
    assert main(["ckpt", "verify", address, "--all"]) == 0
    assert main(["ckpt", "diff", str(tmp_path / "run"), f"{address}/step-00000006"]) == 0
    assert main(["ckpt", "prune", address, "--keep-last", "1"]) == 0
    assert {name.partition("/")[0] for name in open_store(address).sizes("")} == {"owner.json", "step-00000006"}
    assert "intact" in capsys.readouterr().out
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 3
    texts = [file.read_bytes() for file in written]
    store = open_store(address)
    for name, size in store.sizes("").items():
        texts.append(bytearray(size))
        store.read(name, 0, memoryview(texts[-1]))
    texts += [done.encode() for run in (first, again) for done in (run.stdout, run.stderr)]
    assert not [text for text in texts if s3.SECRET.encode() in text or s3.KEY_ID.encode() in text]


def test_a_run_that_is_killed_in_a_save_resumes_from_the_newest_complete_checkpoint(
    proxy: s3.Proxy, address: str, tmp_path: Path
) -> None:
    words = [*_TRAIN, "--run.folder=run", f"--checkpoint.folder={address}", "--ranks=2", "--parallel.strategy=ddp"]
    words.append("--recovery.snapshot_every=null")  # or the next start resumes from the killed launcher's memory
    proxy.plan(Fault("PUT .*step-00000004/manifest.json", "hang", times=1000))
    run = start_lockstep(*words, "--run.steps=100000", cwd=tmp_path)
    run.wait_for(lambda: any("step-00000004/manifest.json" in line for line in proxy.requests))
    run.send(signal.SIGKILL, group=True)
    run.end()
    proxy.plan()
    assert open_store(address).sizes("step-00000004/")
    again = run_lockstep(*words, "--run.steps=3", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resumes from step 2 " in again.stdout + again.stderr
    assert not open_store(address).sizes("step-00000004/")


def test_a_session_saves_to_an_address(proxy: s3.Proxy, address: str) -> None:
    with lockstep.session(small.config()) as session:
        checkpoints = session.checkpoints(address)
        checkpoints.save()
        checkpoints.finish()
    assert ObjectStorage(open_store(address)).names() == ["step-00000000"]


# --- sentences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bucket": "other-bucket"}, "there is no bucket other-bucket at http.* create it"),
        ({"bucket": "_"}, "s3://bucket/prefix holds no credentials"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no complete credentials; set AWS_PROFILE"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "http://127.0.0.1:9 is not reached.* check the network"),
        ({"AWS_ENDPOINT_URL": "nonsense"}, "settings can't be used .*nonsense.* correct AWS_PROFILE"),
        ({"AWS_ENDPOINT_URL": ""}, "settings can't be used .* correct AWS_PROFILE"),
        ({"AWS_PROFILE": "absent"}, "settings can't be used .*absent.* correct AWS_PROFILE"),
        ({"fault": "403"}, r"PUT is not allowed \(AccessDenied\); these credentials need .*s3:PutObject"),
        ({"obstore": None}, r"needs the package obstore: pip install 'lockstep-torch\[buckets\]'"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_bucket_is_said_before_a_rank_starts(
    change: dict[str, Any],
    sentence: str,
    proxy: s3.Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    for name, value in change.items():
        if name == "obstore":
            monkeypatch.setitem(sys.modules, "obstore", None)
        elif name == "fault":
            proxy.plan(Fault("PUT", value, times=1000))
        elif value is None:
            monkeypatch.delenv(name)
        elif name != "bucket":
            monkeypatch.setenv(name, value)
    folder = f"s3://{change.get('bucket', BUCKET)}/run"
    words = [*_TRAIN, "--run.steps=2", f"--checkpoint.folder={folder}", "--checkpoint.retry_seconds=0.3"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.search(sentence, said), said
    assert "checkpoint.folder" in said
    assert s3.SECRET not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"s3://{s3.KEY_ID}:{s3.SECRET}@bucket/x", "holds no credentials"),
        ("s3://bucket/x?versionId=1", "holds no credentials or options"),
        ("s3:///x", "has no bucket"),
        ("file:///data", "write only the path: /data"),
        ("sftp://me:hunter2@host/x", "isn't supported"),
    ],
)
def test_an_address_that_can_not_be_used(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as raised:
        checked_address(text)
    assert s3.SECRET not in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_scheme_that_nothing_knows_is_refused() -> None:
    with fails(ConfigError, "nonsense://", "s3://, gs:// or az://"):
        open_store("nonsense://x/y")
    assert checked_address("s3a://bucket/runs//") == "s3://bucket/runs"
    assert [checked_address(text) for text in ("gcs://b/x", "abfs://b")] == ["gs://b/x", "az://b"]


def test_an_account_of_azure_that_is_not_given_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with fails(ConfigError, "Account", "AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/run").sizes("")


def test_objects_of_azure_are_written_and_read(proxy: s3.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of S3 takes Azure's requests for single objects."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", proxy.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "token")  # a key's signatures may look like a service to it
    store = open_store(f"az://{BUCKET}/objects")
    store.write("small", memoryview(b"12345"))
    into = bytearray(3)
    store.read("small", 1, memoryview(into))
    assert (into, store.size("small")) == (b"234", 5)
    with pytest.raises(FileNotFoundError):
        store.size("absent")
