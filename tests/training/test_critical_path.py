"""No update waits for a disk or a network because it is watched: the training thread calls neither, with everything on.

training thread of each rank    updates 5 ... 30    audit events, calls of os and of stores, the kernel's read and write
other threads                                       the same, seen by the same means: they do the work
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import small
from kit.worlds import in_process, in_world

import lockstep
from lockstep.core.tracking import TrackedRun
from lockstep.loop.session import Session

FIRST, LAST = 5, 30  # updates between which nothing is touched
UPDATE_S = 0.01
EVENTS = ("open", "os.", "socket.", "shutil.", "subprocess.", "tempfile.", "fcntl.", "glob.", "http.", "urllib.")
OS = (
    *(
        "access",
        "chmod",
        "close",
        "dup",
        "fdatasync",
        "fstat",
        "fsync",
        "ftruncate",
        "lseek",
        "lstat",
        "pread",
        "pwrite",
    ),
    *("read", "readlink", "readv", "sendfile", "stat", "statvfs", "sync", "write", "writev"),
)
STORES = (
    *(
        "add",
        "append",
        "check",
        "compare_set",
        "delete_key",
        "get",
        "multi_get",
        "multi_set",
        "num_keys",
        "set",
        "wait",
    ),
)
IO = Path("/proc/thread-self/io")


class Touches:
    """What this process does with files, sockets and stores while `armed`, by whether the training thread does it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.armed = False
        self.own: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.transfers = -1
        sys.addaudithook(lambda event, _: self.note(event) if self.armed and event.startswith(EVENTS) else None)
        for name in OS:
            setattr(os, name, self._noted(f"os.{name}", getattr(os, name)))
        for kind in ("Store", "TCPStore", "PrefixStore", "FileStore"):
            store = getattr(torch._C._distributed_c10d, kind)
            for name in set(STORES).intersection(vars(store)):
                setattr(store, name, self._noted(f"{kind}.{name}", vars(store)[name]))

    def note(self, what: str) -> None:
        (self.own if threading.get_ident() == self._thread else self.others)[what] += 1

    def arm(self) -> None:
        self._before = transfers()
        self.armed = True

    def disarm(self) -> None:
        self.armed = False
        self.transfers = transfers() - self._before

    def _noted(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if self.armed:
                self.note(what)
            return original(*arguments, **options)

        return call


def transfers() -> int:
    """The calling thread's system calls that read or write, as the kernel counts them; this call adds one."""
    if not IO.exists():
        return 0
    file = os.open(IO, os.O_RDONLY)
    fields = dict(line.split(": ") for line in os.read(file, 4096).decode().splitlines())
    os.close(file)
    return int(fields["syscr"]) + int(fields["syscw"])


class Lines(lockstep.extend.Tracker):
    """A tracker that writes a file, without a buffer."""

    def start(self, run: TrackedRun) -> None:
        self._file = open(Path(run.folder) / "lines", "wb", buffering=0)  # noqa: SIM115  (until `finish`)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(f"{step} {dict(values)}\n".encode())

    def finish(self, failure: str | None) -> None:
        self._file.close()


class Logging(lockstep.extend.Monitor):
    """User code that logs at each update."""

    def see(self, report: lockstep.extend.StepReport) -> tuple[()]:
        lockstep.log.scalar("steps", report.step)
        lockstep.log.histogram("numbers", torch.arange(10.0))
        return ()


class Careless(lockstep.extend.Monitor):
    """Opens a file that doesn't exist, reads one in a way that neither audit events nor `os` show, asks the store."""

    def __init__(self) -> None:
        self._file = open("/proc/self/stat", "rb", buffering=0)  # noqa: SIM115  (until the process ends)

    def see(self, report: lockstep.extend.StepReport) -> tuple[()]:
        with contextlib.suppress(FileNotFoundError):
            Path("/no/such/file").read_bytes()
        self._file.seek(0)
        self._file.read(1)
        if dist.is_initialized():
            dist.distributed_c10d._get_default_store().check(["nothing"])
        return ()


def everything(folder: Path) -> dict[str, Any]:
    """A config with each of the monitors and meters, at every update where that can be chosen.

    A save of several ranks begins with a barrier over their store, so only a single rank saves.
    """
    return small.config(
        "Net",
        evaluation={"every": "10 steps"},
        checkpoint={"every": None if dist.is_initialized() else "9 steps"},
        parallel={"strategy": "ddp" if dist.is_initialized() else "single"},
        monitor={
            "every": 1,
            "meter_seconds": 0.05,
            "tensorboard": True,
            "progress": "plain",
            "prometheus": {"port": 0},
            "early_stopping": {"metric": "held-out.loss", "patience": 1000},
        },
        run={"steps": LAST + 5, "folder": str(folder)},
    )


def touched(
    folder: Path, planted: type[lockstep.extend.Monitor] | None = None
) -> tuple[dict[str, int], int, dict[str, int]]:
    """Train with everything on; return what the training thread touched, how often it read or wrote, and what other
    threads touched."""
    patched = pytest.MonkeyPatch()
    patched.setattr("lockstep.monitor.rank_meters.RankMeters.__init__.__defaults__", ((), None, 0.05))
    touches, commit = Touches(), Session.commit

    def committed(session: Session) -> Any:
        report = commit(session)
        time.sleep(UPDATE_S)
        if session.progress.steps == FIRST:
            touches.arm()
        if session.progress.steps == LAST:
            touches.disarm()
        return report

    patched.setattr(Session, "commit", committed)
    monitors = [Logging(), *([planted()] if planted is not None else [])]
    with contextlib.nullcontext() if "RANK" not in os.environ else small.in_group():
        lockstep.train(everything(folder), trackers=[Lines()], monitors=monitors)
    return dict(touches.own), touches.transfers, dict(touches.others)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_update_touches_a_disk_or_a_network(ranks: int, tmp_path: Path) -> None:
    of_ranks = in_world(2, touched, tmp_path) if ranks == 2 else [in_process(touched, tmp_path)]
    for rank, (own, transfers, others) in enumerate(of_ranks):
        assert own == {}, f"rank {rank}"
        if ranks == 1:
            assert transfers == IO.exists(), "that of counting"
        assert others, f"the meters of rank {rank} are seen to work"
    first = of_ranks[0][2]
    assert {"open", "os.write", "os.rename"} <= set(first), "files are written meanwhile, by other threads"
    assert ranks == 1 or {"Store.set", "Store.multi_get"} <= set(first), "and the store is asked"
    assert (tmp_path / "trackers" / "lines").read_bytes().count(b"train/loss'") == LAST + 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_an_update_touches_is_noticed(ranks: int, tmp_path: Path) -> None:
    arguments = (touched, tmp_path, Careless)
    own, transfers, _ = in_world(2, *arguments)[0] if ranks == 2 else in_process(*arguments)
    assert own == dict.fromkeys(["open", "Store.check"][:ranks], LAST - FIRST)
    if ranks == 1 and IO.exists():
        assert transfers == LAST - FIRST + 1
