"""Faults of the disk that are planted."""

from __future__ import annotations

import os
from pathlib import Path

from kit.worlds import in_process

from lockstep.resilience.disk_faults import plant_in_disk


def _met(folder: Path) -> list[str]:
    """Return which writes meet a disk that is full."""
    memory, disk = Path(f"/dev/shm/lockstep-{os.getuid()}-{os.getpid()}/.draft-step-1"), folder / ".draft-step-1"
    met: list[str] = []
    plant_in_disk("full", lambda: met.append("hit"))
    for place in (memory, folder / "step-1", disk):
        place.mkdir(parents=True)
        handle = os.open(place / "file", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(handle, b"x")
        except OSError as error:
            met.append(f"{place.name} {error.strerror}")
        os.close(handle)
    (memory / "file").unlink()
    memory.rmdir()
    memory.parent.rmdir()
    return met


def test_snapshots_in_memory_are_on_no_disk(tmp_path: Path) -> None:
    assert in_process(_met, tmp_path) == ["hit", ".draft-step-1 No space left on device"]
