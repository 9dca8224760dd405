"""A folder of the cache is made once, whatever ends its maker, and every process reads the same."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.failures import fails
from kit.worlds import served

from lockstep.core import cache_files
from lockstep.core.errors import ConfigError
from lockstep.data.tokens import cached_folder

Show = Callable[[str], None]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cache_files.CACHE, str(tmp_path))
    return tmp_path / "packed"


def write(folder: Path, show: Show, seconds: float = 0.0) -> None:
    with (folder / "tokens").open("w") as file:
        for number in range(5):
            file.write(str(number))
            show(f"{number + 1} of 5 documents")
            time.sleep(seconds)


def cached(key: str, make: Callable[[Path, Show], None] = write) -> str:
    return (cached_folder("packed", key, "tokenizing dataset data", make) / "tokens").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_folder_is_made_once():
    calls: list[int] = []

    def make(folder: Path, show: Show) -> None:
        calls.append(1)
        write(folder, show)

    assert [cached("key", make) for _ in range(2)] == ["01234"] * 2
    assert calls == [1]
    cached("another", make)
    assert calls == [1, 1]


def _opened(cache: str, count: Path, seconds: float, results: Path) -> None:
    os.environ[cache_files.CACHE] = cache
    cache_files._SHOWN_S = 0.05

    def make(folder: Path, show: Show) -> None:
        with count.open("a") as file:
            file.write(f"{os.getpid()}\n")
        write(folder, show, seconds)

    (results / str(os.getpid())).write_text(cached("key", make))


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "the writer is killed"])
def test_several_processes_write_one_stream(killed, tmp_path, folder):
    count, results = tmp_path / "count", tmp_path / "results"
    results.mkdir()
    make = served().Process
    processes = [make(target=_opened, args=(str(tmp_path), count, 0.15, results)) for _ in range(3)]
    for process in processes:
        process.start()
    until = time.monotonic() + 60
    while not count.exists() or not count.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.01)
    writers = 1
    if killed:
        time.sleep(0.2)
        os.kill(int(count.read_text()), signal.SIGKILL)
        writers = 2
    for process in processes:
        process.join(60)
    assert len(count.read_text().split()) == writers
    assert [file.read_text() for file in results.iterdir()] == ["01234"] * (4 - writers)
    assert names(folder) == ["key"]


def test_waiting_processes_show_what_the_writer_has_done(folder, monkeypatch, capsys):
    monkeypatch.setattr(cache_files, "_SHOWN_S", -1.0)
    attempts = iter([False, False, True])
    monkeypatch.setattr(cache_files, "_try_lock", lambda handle: next(attempts))
    folder.mkdir()
    (folder / "key.lock").write_text("3 of 5 documents")
    cached("key")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["lockstep: tokenizing dataset data: 3 of 5 documents"] * 2
    assert lines[-1] == "lockstep: tokenizing dataset data: 5 of 5 documents"
    monkeypatch.setattr(cache_files, "_try_lock", lambda handle: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cached("another")
    assert capsys.readouterr().err == ""


def _fail(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    return fail


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_another_users_cache_is_read_and_one_that_cant_be_written_is_named(number, folder, monkeypatch):
    cached("key")
    monkeypatch.setattr(cache_files, "_opened", _fail(number))
    assert cached("key") == "01234"
    with fails(ConfigError, "LOCKSTEP_CACHE"):
        cached("another")
    assert names(folder) == ["key"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "No space left on device; set LOCKSTEP_CACHE to a folder with space"),
        (errno.EIO, "Input/output error; set LOCKSTEP_CACHE"),
    ],
)
def test_a_disk_that_is_full_or_fails_is_reported_and_nothing_is_left(number, message, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "flush", _fail(number))
        with pytest.raises(ConfigError, match=message):
            cached("key")
    assert names(folder) == []
    assert cached("key") == "01234"


def test_drafts_of_writers_that_live_elsewhere_stay(folder):
    folder.mkdir()
    for draft, age in (("key@elsewhere@1.part", 10), ("key@elsewhere@2.part", 10_000)):
        (folder / draft).mkdir()
        (folder / draft / "tokens").touch()
        os.utime(folder / draft / "tokens", (time.time() - age,) * 2)
    cached("key")
    assert names(folder) == ["key", "key@elsewhere@1.part"]


def test_a_killed_writer_has_ended_though_its_parent_does_not_know_it_yet():
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert not cache_files._is_running(process)
    os.waitpid(process, 0)
    assert not cache_files._is_running(process)
    assert cache_files._is_running(os.getpid())
