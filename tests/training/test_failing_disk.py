"""The disk of a run's folder fails for good: at some moment nothing can be written there anymore.

read-only    an ext4 file system in a file, which is made to abort      needs the right to mount
EIO          what asks for a file to be written gets an I/O error
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint import inspection
from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.core.errors import Failure
from lockstep.training import job

STEPS = 12
FILES = ("metrics.jsonl", "events.jsonl", "ranks.jsonl", "tensorboard")
Fault = Callable[[Path], None]


def _read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)


def _eio(disk: Path) -> None:
    """In this process."""
    folder = str(disk)
    write, make, open_, rename = os.write, os.mkdir, os.open, os.rename

    def refuse(path: Any) -> None:
        if os.fspath(path).startswith(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

    def writing(handle: int, data: Any) -> int:
        refuse(os.readlink(f"/proc/self/fd/{handle}"))
        return write(handle, data)

    def making(path: Any, *how: Any, **more: Any) -> None:
        refuse(path)
        make(path, *how, **more)

    def opening(path: Any, flags: int, *how: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse(path)
        return open_(path, flags, *how, **more)

    def renaming(old: Any, new: Any, **more: Any) -> None:
        refuse(old)
        rename(old, new, **more)

    for name, act in (("write", writing), ("mkdir", making), ("open", opening), ("rename", renaming)):
        setattr(os, name, act)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder; if a test is to make it read-only, the root of a file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if request.param is _eio:
        yield place
        return
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 2**24)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system can't be mounted here: {error}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _train(config: dict[str, Any], fault: Fault, when: str) -> tuple[str, int, list[str]]:
    """How the run failed: message, exit code, what it warned of on this rank."""
    disk = Path(config["run"]["folder"]).parent
    forward, publish, publish_weights, forwards = small.Net.forward, LocalDraft.publish, job.publish, 0
    first = os.environ["RANK"] == "0"
    warned: list[str] = []

    def fail(now: bool) -> None:
        if now and (first or fault is _eio):
            fault(disk)

    def forwarding(net: small.Net, points: torch.Tensor) -> torch.Tensor:
        nonlocal forwards
        forwards += net.training
        fail(net.training and forwards == {"first update": 1, "middle": 6, "last update": STEPS}.get(when))
        return forward(net, points)

    def publishing(draft: LocalDraft, manifest: bytes) -> None:
        fail(when == "save" and draft._target.name == "step-00000008")
        publish(draft, manifest)

    def publishing_weights(session: Any, folder: Any) -> Any:
        fail(when == "after the last save")
        return publish_weights(session, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(disk.parent)
        patch.setattr(small.Net, "forward", forwarding)
        patch.setattr(LocalDraft, "publish", publishing)
        patch.setattr(job, "publish", publishing_weights)
        patch.setattr("logging.Logger.warning", lambda log, text, *more, **how: warned.append(text % more))
        try:
            lockstep.train(config)
        except Failure as failure:
            return str(failure), failure.exit_code, warned
    return "", 0, warned


_MOMENTS = ["first update", "middle", "save", "last update", "after the last save"]
_OFTEN = {(_eio, "middle", 2), (_eio, "after the last save", 1), (_read_only, "save", 2)}
_ROWS = [
    pytest.param(fault, fault, when, ranks, marks=() if (fault, when, ranks) in _OFTEN else pytest.mark.drill)
    for fault in (_eio, _read_only)
    for when in _MOMENTS
    for ranks in (1, 2)
]


@pytest.mark.parametrize(("disk", "fault", "when", "ranks"), _ROWS, indirect=["disk"])
def test_a_disk_that_fails_costs_no_training(disk: Path, fault: Fault, when: str, ranks: int) -> None:
    run = disk / "run"
    monitor = {"every": 1, "tensorboard": True, "progress": "plain"}
    section = {"every": "4 steps", "asynchronous": False, "retry_seconds": 0}
    config = small.config(run={"steps": STEPS, "folder": str(run)}, monitor=monitor, checkpoint=section)
    ended = in_world(ranks, _train, config, fault, when)
    message, _, warned = ended[0]
    assert {one[:2] for one in ended} == {(message, 1)}
    cause = "Input/output error" if fault is _eio else "Read-only file system"
    assert cause in message
    assert len(warned) == len(set(warned))
    if when == "after the last save":
        assert "trained weights" in message
        assert message.endswith(f" step {STEPS} is saved in {run}/checkpoints")
        *_, whole = inspection.verify_all(LocalStorage(run / "checkpoints"))
        assert (whole.name, whole.fault) == (f"step-{STEPS:08d}", None)
        return
    unwritten = {name for name in FILES if any("can't write" in text and name in text for text in warned)}
    assert unwritten - {"ranks.jsonl"} == {"metrics.jsonl", "events.jsonl", "tensorboard"}
    assert gives(message, "state", f"step {STEPS}", cause)
