"""Runs whose folder is in a bucket: a real server on loopback, and machines that are cache folders of their own."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit import s3
from kit.commands import run_lockstep, start_lockstep
from kit.s3 import BUCKET, Fault

import lockstep
from lockstep.cli.main import main
from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.core.cache_files import CACHE, locked
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.stores.s3 import S3Store
from lockstep.training import store_lock, stored_run
from lockstep.training.job import Job
from lockstep.training.start_run import has_nothing_to_train
from lockstep.training.store_lock import LOCK, StoreLock
from lockstep.training.stored_run import StoredRun, _publish_until_end, opened_run
from lockstep.training.working_copy import WorkingCopy, stored_at, working_folder

_TRAIN = (
    "train", "digits", "--run.epochs=null", "--monitor.progress=plain", "--monitor.tensorboard=false",
    "--monitor.every=1", "--evaluation.every=null", "--evaluation.at_end=false", "--launch.device=cpu",
    "--checkpoint.every=2 steps", "--checkpoint.retry_seconds=3",
)  # fmt: skip
_DDP = ("--ranks=2", "--parallel.strategy=ddp")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3.serving() as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[s3.Proxy]:
    with s3.proxied(server) as between:
        for name, value in s3.environment(between.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(CACHE)  # which commands in tests don't have either
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
        yield between


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{re.sub('[^a-z0-9]', '-', request.node.name)[:60]}"


def _losses(metrics: bytes) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, metrics.splitlines()) if "loss" in line}


def _read(address: str, name: str) -> bytes:
    return S3Store(address).read_tagged(name)[0]


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_on_another_machine_with_the_undisturbed_runs_losses(
    proxy: s3.Proxy, address: str, tmp_path: Path
) -> None:
    undisturbed = run_lockstep(*_TRAIN, "--run.folder=here", "--run.steps=7", *_DDP, cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    proxy.plan(Fault("PUT .*step-00000006/manifest.json", "hang", times=1000))
    words = [*_TRAIN, f"--run.folder={address}", *_DDP]
    run = start_lockstep(*words, "--run.steps=7", cwd=tmp_path)
    run.wait_for(lambda: any("step-00000006/manifest.json" in line for line in proxy.requests))
    run.send(signal.SIGKILL, group=True)
    run.end()
    proxy.plan()
    until = time.monotonic() + 30
    while LOCK in S3Store(address).sizes(LOCK) and time.monotonic() < until:  # its publisher was not killed
        time.sleep(0.05)
    assert _read(address, "logs/rank-0.log") == (working_folder(address) / "logs" / "rank-0.log").read_bytes()
    shutil.rmtree(tmp_path / "machine")
    again = run_lockstep("train", address, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resumes from step 4 " in again.stdout + again.stderr
    expected = _losses((tmp_path / "here" / "metrics.jsonl").read_bytes())
    assert list(expected) == [1, 2, 3, 4, 5, 6, 7]
    assert _losses(_read(address, "metrics.jsonl")) == expected
    assert main(["ckpt", "audit", address]) == 0
    assert LOCK not in S3Store(address).sizes("")
    _refuse_secrets(address, tmp_path, run.output + again.stdout + again.stderr)


def _refuse_secrets(address: str, folder: Path, output: str) -> None:
    """Fail if what two machines and the bucket have of a run holds credentials."""
    texts = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    texts += [_read(address, name) for name in S3Store(address).sizes("")]
    assert len(texts) > 20
    for secret in (s3.SECRET, s3.KEY_ID):
        assert not [text for text in [*texts, output.encode()] if secret.encode() in text]


@pytest.fixture(scope="module")
def finished(server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a run of four steps."""
    folder, address = tmp_path_factory.mktemp("finished"), f"s3://{BUCKET}/finished"
    environment = {**s3.environment(server), "XDG_CACHE_HOME": str(folder)}
    done = run_lockstep(*_TRAIN, f"--run.folder={address}", "--run.steps=4", cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    return address


def _copied(address: str, target: str) -> S3Store:
    """A copy of a run in the bucket."""
    copy = S3Store(target)
    for name in S3Store(address).sizes(""):
        copy.write(name, memoryview(_read(address, name)))
    return copy


def test_every_verb_takes_the_address_of_a_run(
    finished: str, proxy: s3.Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = _copied(finished, f"{finished}-verbs").place
    assert main(["ckpt", "verify", address, "--all"]) == 0
    assert "model/model.safetensors  intact" in capsys.readouterr().out
    assert main(["doctor", address]) == 0
    summary = _read(address, "summary.json")
    S3Store(address).delete(["summary.json"])
    holder = _elsewhere(S3Store(address))
    assert main(["doctor", address]) == 0
    assert "locked by process" in capsys.readouterr().out
    assert main(["ckpt", "prune", address, "--dry-run"]) == 0
    holder.release()
    S3Store(address).write("summary.json", memoryview(summary))
    assert main(["report", address, "--output", str(tmp_path / "page.html")]) == 0
    assert main(["compare", address, finished, "--output", str(tmp_path / "page.html"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert [(run["run"], run["label"]) for run in compared] == [
        (address, address.rpartition("/")[2]),
        (finished, finished.rpartition("/")[2]),
    ]
    assert main(["export", address, "--to", str(tmp_path / "model.safetensors")]) == 0
    assert main(["export", address]) == 2
    assert "--to is needed" in capsys.readouterr().err
    fork = run_lockstep("train", address, "--from=2", f"--fork={address}-fork", "--run.steps=3", cwd=tmp_path)
    assert fork.returncode == 0, fork.stderr
    assert _losses(_read(f"{address}-fork", "metrics.jsonl")).keys() == {3}
    assert main(["train", address, f"--fork={address}-fork"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["ckpt", "prune", address, "--keep-last=1"]) == 0
    assert {name.split("/")[1] for name in S3Store(address).sizes("checkpoints/")} == {"owner.json", "step-00000004"}
    fresh = run_lockstep("train", address, "--fresh", "--run.steps=2", cwd=tmp_path)
    assert fresh.returncode == 0, fresh.stderr
    names = S3Store(address).sizes("")
    assert {"earlier/1/model/model.safetensors", "earlier/1/summary.json", "summary.json"} <= names.keys()
    assert _losses(_read(address, "metrics.jsonl")).keys() == {1, 2}


def test_hosts_without_a_shared_folder_train_one_run(
    proxy: s3.Proxy, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = _free_port()
    words = [*_TRAIN, f"--run.folder={address}", "--run.steps=3", "--nodes=2", f"--rendezvous=127.0.0.1:{port}"]
    hosts = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "machine"))
        hosts.append(start_lockstep(*words, f"--ranks={ranks}", "--launch.interface=lo", cwd=folder))
    assert [host.end() for host in hosts] == [0, 0], [host.output for host in hosts]
    names = S3Store(address).sizes("")
    assert {f"logs/rank-{rank}.log" for rank in range(3)} <= names.keys()
    assert list(_losses(_read(address, "metrics.jsonl"))) == [1, 2, 3]


def test_each_rank_of_another_launcher_finds_that_nothing_is_left_to_train(
    finished: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    overrides = [word.removeprefix("--") for word in _TRAIN[2:]]
    config = load([resolve_recipe("digits").path], [*overrides, "run.steps=4", f"run.folder={finished}"]).config
    with opened_run(Job(config, "digits"), is_first=False) as job:
        assert has_nothing_to_train(job.config, Path(str(job.config.run.folder)))
    assert not (tmp_path / "machine").exists()
    done = lockstep.train(config, ranks=2)
    assert done.summary["steps"] == 4
    assert LOCK not in S3Store(finished).sizes("")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.drill
def test_a_copy_of_a_run_and_a_damaged_checkpoint(finished: str, proxy: s3.Proxy, tmp_path: Path) -> None:
    store, copy = S3Store(finished), _copied(finished, f"{finished}-copy")
    before = store.tags("")
    newest = bytearray(_read(finished, "checkpoints/step-00000004/rank-00000.safetensors"))
    newest[-100] ^= 1
    copy.write("checkpoints/step-00000004/rank-00000.safetensors", memoryview(newest))
    again = run_lockstep("train", copy.place, "--run.steps=5", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resumes from step 2 " in again.stdout + again.stderr
    assert list(_losses(_read(copy.place, "metrics.jsonl"))) == [1, 2, 3, 4, 5]
    assert store.tags("") == before


@pytest.mark.drill
def test_a_run_whose_end_can_not_be_published_fails_and_resumes(proxy: s3.Proxy, address: str, tmp_path: Path) -> None:
    proxy.plan(Fault("PUT .*/summary.json", "403", times=1000))
    words = [*_TRAIN, f"--run.folder={address}", "--run.steps=2"]
    failed = run_lockstep(*words, cwd=tmp_path)
    assert failed.returncode == 1
    assert "PutObject is not allowed" in failed.stderr
    assert "the state after step 2 is saved in" in failed.stderr
    assert "Traceback" not in failed.stderr
    proxy.plan()
    again = run_lockstep(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "summary.json" in S3Store(address).sizes("")


# --- the lock -------------------------------------------------------------------------------------------------------


def _elsewhere(store: S3Store) -> StoreLock:
    """A lock that a process of another machine holds."""
    held = StoreLock(store)
    held.take(print)
    content = json.loads(store.read_tagged(LOCK)[0])
    store.write(LOCK, memoryview(json.dumps({**content, "machine": "another"}).encode()))
    return held


def test_a_run_that_is_running_is_not_trained_twice(proxy: s3.Proxy, address: str) -> None:
    holder, other = StoreLock(S3Store(address)), StoreLock(S3Store(address))
    holder.take(print)
    with pytest.raises(RunFailed, match=r"is running \(process [0-9]+ on .*; give run.folder another name"):
        other.take(print)
    other.release()
    assert holder.is_held()
    assert holder.renew()
    holder.release()
    other.take(print)
    assert not holder.renew()


def test_a_process_that_has_ended_holds_no_lock(proxy: s3.Proxy, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, other = StoreLock(S3Store(address)), StoreLock(S3Store(address))
    with monkeypatch.context() as then:
        then.setattr(store_lock, "_started", lambda process: "1")
        holder.take(print)
    other.take(lambda text: pytest.fail("waits"))
    assert other.is_held()
    assert not holder.is_held()


@pytest.mark.parametrize("does", ["nothing", "renews", "ends"])
def test_a_lock_of_another_machine_is_watched(
    does: str, proxy: s3.Proxy, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lock, "GONE_S", 0.3)
    store, shown = S3Store(address), list[str]()
    holder, other = _elsewhere(store), StoreLock(S3Store(address))

    def sleep(seconds: float) -> None:
        if does == "renews":
            assert holder.renew()
        elif does == "ends":
            holder.release()

    monkeypatch.setattr(store_lock.time, "sleep", sleep)
    if does == "renews":
        with pytest.raises(RunFailed, match="is running"):
            other.take(shown.append)
        assert holder.is_held()
    else:
        other.take(shown.append)
        assert other.is_held()
    assert "waiting 0.3 s to see whether it lives" in shown[0]


def test_of_two_that_take_over_a_lock_one_gets_it(proxy: s3.Proxy, address: str) -> None:
    store = S3Store(address)
    _elsewhere(store)
    tag = store.read_tagged(LOCK)[1]
    store.replace(LOCK, b"first", tag)
    with pytest.raises(FileExistsError):
        store.replace(LOCK, b"second", tag)
    proxy.plan(Fault("PUT", "lost"))
    store.replace(LOCK, b"third", store.read_tagged(LOCK)[1])  # the answer is lost, and the call repeated
    store.delete([LOCK])
    with pytest.raises(FileExistsError):
        store.replace(LOCK, b"fourth", tag)


def test_a_process_that_has_lost_the_lock_publishes_nothing(proxy: s3.Proxy, address: str) -> None:
    copy = WorkingCopy(address)
    copy.lock.take(print)
    copy.folder.mkdir(parents=True)
    (copy.folder / "metrics.jsonl").write_text("{}\n")
    copy.publish()
    _elsewhere(S3Store(f"{address}/x"))
    S3Store(address).copy(f"x/{LOCK}", LOCK)
    (copy.folder / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(RunFailed, match="another process trains the run"):
        copy.publish()
    assert _read(address, "metrics.jsonl") == b"{}\n"


# --- the working copy -----------------------------------------------------------------------------------------------


def test_the_bucket_is_what_counts_but_for_longer_logs(proxy: s3.Proxy, address: str, tmp_path: Path) -> None:
    copy, store = WorkingCopy(address), S3Store(address)
    for name, text in {"config.yaml": b"a: 1", "logs/rank-0.log": b"one\n", "logs/rank-1.log": b"one\ntwo\n"}.items():
        store.write(name, memoryview(text))
    for name, text in {"summary.json": "{}", "logs/rank-0.log": "one\ntwo\n", "logs/rank-1.log": "one\n"}.items():
        (copy.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (copy.folder / name).write_text(text)
    copy.fetch()
    assert not (copy.folder / "summary.json").exists()
    assert (copy.folder / "logs/rank-0.log").read_text() == "one\ntwo\n"
    assert (copy.folder / "logs/rank-1.log").read_text() == "one\ntwo\n"
    assert stored_at(copy.folder) == address
    proxy.plan()
    copy.fetch()
    assert [line for line in proxy.requests if line.startswith("GET") and "config.yaml" in line] == []


def test_a_log_that_is_longer_here_is_published(proxy: s3.Proxy, address: str) -> None:
    copy, store = WorkingCopy(address), S3Store(address)
    store.write("logs/rank-0.log", memoryview(b"one\n"))
    (copy.folder / "logs").mkdir(parents=True)
    (copy.folder / "logs/rank-0.log").write_text("one\ntwo\n")
    copy.lock.take(print)
    copy.fetch()
    copy.publish()
    assert _read(address, "logs/rank-0.log") == b"one\ntwo\n"


def test_records_beside_the_logs_are_those_in_the_bucket(
    proxy: s3.Proxy, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine, content in (("first", '{"applied": false}'), ("second", '{"applied": true}')):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        copy = WorkingCopy(address)
        copy.lock.take(print)
        copy.fetch()
        for name in ("config.yaml", "logs/rollbacks.json", "logs/deadly_samples.jsonl"):
            (copy.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (copy.folder / name).write_text(content)
        copy.publish()
        copy.lock.release()
    S3Store(address).delete(["logs/deadly_samples.jsonl"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    copy = WorkingCopy(address)
    copy.lock.take(print)
    copy.fetch()
    copy.publish()
    assert (copy.folder / "logs/rollbacks.json").read_text() == '{"applied": true}'
    assert _read(address, "logs/rollbacks.json") == b'{"applied": true}'
    assert "logs/deadly_samples.jsonl" not in S3Store(address).sizes("")
    assert not (copy.folder / "logs/deadly_samples.jsonl").exists()


def test_a_full_disk_under_the_working_copy_is_reported_with_its_file(proxy: s3.Proxy, address: str) -> None:
    S3Store(address).write("config.yaml", memoryview(b"x"))
    S3Store(address).write("metrics.jsonl", memoryview(b"y" * 3_000_000))
    config = load([resolve_recipe("digits").path], [f"run.folder={address}"]).config
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        place = (
            rf"run\.folder: {working_folder(address)}/metrics.jsonl: File too large; set {CACHE} to a folder with space"
        )
        with pytest.raises(ConfigError, match=place), opened_run(Job(config, "digits")):
            pytest.fail("it begins")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(working_folder(address).glob(".*"))
    assert LOCK not in S3Store(address).sizes("")


def test_only_what_a_run_removes_is_removed_from_the_bucket(proxy: s3.Proxy, address: str) -> None:
    copy, store = WorkingCopy(address), S3Store(address)
    copy.lock.take(print)
    for name in ("logs/rank-0.log", "model/a", "metrics.jsonl", "summary.json", "config.yaml"):
        (copy.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (copy.folder / name).write_text("x")
    copy.publish()
    proxy.plan()
    copy.publish()
    assert not [line for line in proxy.requests if line.startswith(("PUT", "DELETE", "POST"))]
    before = store.tags("")
    shutil.rmtree(copy.folder)  # as all of the cache may be
    copy.publish()
    assert store.tags("") == before
    copy.fetch()
    for name in ("model/a", "metrics.jsonl", "summary.json"):
        (copy.folder / name).unlink()
    copy.publish(lambda name: name.startswith("model/"))
    assert store.sizes("").keys() == {"config.yaml", "logs/rank-0.log", "metrics.jsonl", LOCK, "summary.json"}
    proxy.plan()
    (copy.folder / "config.yaml").write_text("y")
    copy.publish(lambda name: True)
    changes = [line for line in proxy.requests if line.startswith(("PUT", "DELETE", "POST"))]
    assert "summary.json" in changes[0], changes  # the run isn't finished before anything else of it changes
    assert store.sizes("").keys() == {"config.yaml", "logs/rank-0.log", LOCK}


def test_a_run_that_is_refused_before_it_starts_leaves_nothing(proxy: s3.Proxy, address: str) -> None:
    copy = WorkingCopy(address)
    copy.lock.take(print)
    (copy.folder / "logs").mkdir(parents=True)
    (copy.folder / "logs/rank-0.log").write_text("x")
    copy.publish()
    shutil.rmtree(copy.folder)
    copy.publish()
    copy.lock.release()
    assert S3Store(address).sizes("") == {}


def test_a_publisher_that_is_killed_is_replaced_at_the_end(
    proxy: s3.Proxy, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_run, "_PUBLISHER", ("-c", "import os; os.kill(os.getpid(), 9)"))
    config = load([resolve_recipe("digits").path], [f"run.folder={address}"]).config
    with opened_run(Job(config, "digits")) as job:
        folder = Path(str(job.config.run.folder))
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("x")
        assert LOCK in S3Store(address).sizes("")
    assert S3Store(address).sizes("").keys() == {"config.yaml"}


def _publishers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if stored_run.__name__ in child.cmdline()]


def test_a_publisher_that_is_killed_is_started_again(
    proxy: s3.Proxy, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load([resolve_recipe("digits").path], [f"run.folder={address}"]).config
    with opened_run(Job(config, "digits")) as job:
        [first] = _publishers()
        first.kill()
        until = time.monotonic() + 30
        while first in (now := _publishers()) or not now:
            assert time.monotonic() < until
            time.sleep(0.02)
        folder = Path(str(job.config.run.folder))
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("x")
    assert "has ended; it is started again" in capsys.readouterr().err
    assert S3Store(address).sizes("").keys() == {"config.yaml"}
    assert not _publishers()


def test_the_lock_is_renewed_while_a_publication_waits(
    proxy: s3.Proxy, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renewals() -> int:
        return int(json.loads(_read(address, LOCK))["renewals"])

    def wait_for_more() -> None:
        until, before = time.monotonic() + 30, renewals()
        while renewals() < before + 3:
            assert time.monotonic() < until
            time.sleep(0.02)

    monkeypatch.setattr(stored_run, "RENEWED_S", 0.05)
    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(reading))
    copy = WorkingCopy(address)
    copy.lock.take(print)
    held = StoredRun(address, str(copy.lock.token), 3.0)
    publisher = threading.Thread(target=_publish_until_end, args=(held,))
    (copy.folder / "logs").mkdir(parents=True)
    with locked(copy.folder.with_name(f"{copy.folder.name}.lock"), "another publication"):
        publisher.start()
        wait_for_more()
        os.close(writing)
        wait_for_more()
    publisher.join(30)
    assert LOCK not in S3Store(address).sizes("")


@pytest.mark.parametrize("name", ["../outside", "logs/../../outside", ".hidden", "a//b"])
def test_an_object_that_is_no_file_of_a_run_is_refused(name: str, proxy: s3.Proxy, address: str, server: str) -> None:
    prefix = address.partition(f"{BUCKET}/")[2]
    s3.client(server).put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"x")
    with pytest.raises(OSError, match="not the name of a run's file"):
        WorkingCopy(address).fetch()


# --- sentences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bucket": "other-bucket"}, r"s3://other-bucket/run.*there is no bucket other-bucket .* create it"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "http://127.0.0.1:9 is not reached .* check the network"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no complete AWS credentials; set AWS_PROFILE"),
        ({"fault": "PUT"}, r"PutObject is not allowed \(AccessDenied\); these credentials need s3:PutObject"),
        ({"fault": "GET"}, r"ListObjectsV2 is not allowed \(AccessDenied\); these credentials need s3:ListBucket"),
        ({"object": "photo.jpg"}, r"holds something else already \(photo.jpg\); give the new run another prefix"),
        ({"locked": "yes"}, r"the run in s3://.* is running \(process"),
        ({"folder": "gs://b/x"}, r"can be in s3:// alone.* give a path here, and checkpoint.folder: gs://b/x"),
        ({"cache": "/proc/nothing"}, f"set {CACHE} to a folder that can be written"),
    ],
    ids=str,
)
def test_what_is_wrong_is_reported_before_a_rank_starts(
    change: dict[str, Any],
    sentence: str,
    proxy: s3.Proxy,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = change.get("folder", f"s3://{change['bucket']}/run" if "bucket" in change else address)
    if "object" in change:
        S3Store(address).write(change["object"], memoryview(b"x"))
    if "locked" in change:
        StoreLock(S3Store(address)).take(print)
    for name, value in change.items():
        if name.isupper():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    if "cache" in change:
        monkeypatch.setenv(CACHE, change["cache"])
    before = None if {"bucket", "folder"} & change.keys() else s3.client(proxy.endpoint)
    if "fault" in change:
        proxy.plan(Fault(change["fault"], "403", times=1000))
    code = main([*_TRAIN, "--run.steps=2", f"--run.folder={folder}", "--checkpoint.retry_seconds=0.3"])
    assert code == (1 if "locked" in change else 2)
    printed = capsys.readouterr().err
    assert re.search(sentence, printed), printed
    assert "run.folder: " in printed or "locked" in change or "folder" in change
    assert s3.SECRET not in printed
    assert "Traceback" not in printed
    proxy.plan()
    if before is not None:
        prefix = address.partition(f"{BUCKET}/")[2] + "/"
        listed = before.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        left = {each["Key"].removeprefix(prefix) for each in listed}
        assert left == {"photo.jpg"} & {change.get("object")} | ({LOCK} if "locked" in change else set())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "gs://b/x"], "can be in s3:// alone"),
        (["eval", f"s3://{BUCKET}/nothing"], "there is no run in s3://.*/nothing: it has no config.yaml"),
        (["train", f"s3://{BUCKET}/nothing"], "there is no run in s3://.*/nothing: it has no config.yaml"),
        (["report", "s3://other-bucket/x"], "there is no bucket other-bucket"),
        (["train", f"s3://{s3.KEY_ID}:{s3.SECRET}@b/x"], "holds no credentials"),
    ],
    ids=str,
)
def test_an_address_of_no_run_is_refused(
    words: list[str], sentence: str, proxy: s3.Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert re.search(sentence, printed), printed
    assert s3.SECRET not in printed


def test_the_working_copy_is_named_after_the_run() -> None:
    first, second = working_folder("s3://bucket/runs/digits"), working_folder("s3://other/runs/digits")
    assert first.name.startswith("digits-")
    assert first != second
