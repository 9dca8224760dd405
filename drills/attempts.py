"""Starts `lockstep train` in its own process group, and checks the files that it leaves.

attempt = Attempt(run, ["digits", "--ranks=2"])      attempt.wait(...)      attempt.kill()      damage(run) == []
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import Reader, ReadItem, read_manifest, verify
from lockstep.checkpoint.storage import checkpoint_name, names_by_step

PATIENCE = 180.0  # seconds, after which a run hangs


def start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of Lockstep in its own process group, in the folder of its log."""
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=log.parent, start_new_session=True,
        )  # fmt: skip


class Attempt:
    """`lockstep train` in its own process group."""

    last: Attempt | None = None

    def __init__(self, run: Path, words: Sequence[str]) -> None:
        Attempt.last = self
        self.run = run
        self._log = run.with_name(f"{run.name}.log")
        common = ["--monitor.progress=none", "--monitor.tensorboard=false", "--launch.device=cpu"]
        self._process = start(["lockstep", "train", *words, f"--run.folder={run}", *common], self._log)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def lives(self) -> bool:
        return self.code is None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> bool:
        """Kill all its processes at once; return whether it was alive."""
        lived = self.lives
        if lived:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._wait_for_ranks()
        return lived

    def end(self) -> None:
        """Wait until it is done."""
        code = self._process.wait(20 * PATIENCE)
        if code != 0:
            raise SystemExit(f"a run failed with exit code {code}:\n{self.output[-3000:]}")

    def wait(self, moment: Callable[[], bool], pause: float = 0.01) -> bool:
        """Wait until `moment()` is true or the run is over; return whether it is true."""
        deadline = time.monotonic() + PATIENCE
        while not moment():
            if not self.lives:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise SystemExit(f"a run hangs:\n{self.output[-3000:]}")
            time.sleep(pause)
        return True

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while any(processes_of_group(self._process.pid)):
            assert time.monotonic() < deadline, "ranks outlive SIGKILL"
            time.sleep(0.001)


def processes_of_group(group: int) -> Iterator[int]:
    """Yield the processes of the group that still run."""
    return (int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _group_of(pid) == group)


def _group_of(pid: str) -> int | None:
    """Return the process group; None if the process is dead already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[2])


@contextmanager
def no_processes_left() -> Iterator[None]:
    """Kill the last run when the drill is interrupted."""
    try:
        yield
    finally:
        if Attempt.last is not None:
            Attempt.last.kill()


def machine() -> dict[str, Any]:
    """Return where and when figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


# --- files of a run ---------------------------------------------------------------------------------------------


def saves_of(run: Path) -> LocalStorage:
    return LocalStorage(run / "checkpoints")


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return max(names_by_step(saves_of(run).names()), default=0)


def damage(run: Path) -> list[str]:
    """Return what is wrong with the published checkpoints."""
    return [
        f"{name}: {verified.fault}"
        for name in saves_of(run).names()
        if (verified := verify(saves_of(run), name)).fault is not None
    ]


def state_hash(run: Path) -> str:
    """Return the hash of every tensor of the newest checkpoint, however it is sharded."""
    storage, name = saves_of(run), checkpoint_name(newest(run))
    manifest = read_manifest(storage, name)
    digest = hashlib.sha256()
    reader = Reader(storage, name, manifest)
    for key, entry in sorted(manifest.tensors.items()):
        memory = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        reader.read([ReadItem(key, entry.info.whole, memory)])
        digest.update(f"{key} {entry.info}".encode())
        digest.update(memory.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_hash(run: Path) -> str:
    """Return the hash of a finished run's model."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def history(run: Path) -> list[tuple[int, float]]:
    """Return steps and losses, as logged by all attempts."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def manifest_of(run: Path) -> Manifest:
    return read_manifest(saves_of(run), checkpoint_name(newest(run)))


def size_of(file: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
