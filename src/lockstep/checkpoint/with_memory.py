"""The checkpoints that a run may resume from: those of its storage, and the snapshots in memory.

runs/digits/checkpoints    step-00000400               step-00000480
memory                                  step-00000470                 step-00000490    resumes from this one
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.checkpoint.storage import names_by_step

if TYPE_CHECKING:
    from lockstep.checkpoint.local import LocalStorage
    from lockstep.checkpoint.storage import Storage, StoredFile


class WithMemory:
    """Reads checkpoints from memory, and those that aren't there from a storage.

    Args:
        memory: This host's. A checkpoint that both have is deleted there by `names`, which rank 0 calls before any rank
            opens one.
        is_shared: Whether it is that of all ranks, and has the files of all.
    """

    def __init__(self, storage: Storage, memory: LocalStorage, *, is_shared: bool = True) -> None:
        self._storage = storage
        self._memory = memory
        self._is_shared = is_shared

    @property
    def place(self) -> str:
        return self._storage.place

    @property
    def run(self) -> str | None:
        return self._storage.run

    def names(self) -> list[str]:
        durable = self._storage.names()
        drop(self._memory, lambda step, name: name in durable)
        return [*durable, *self._memory.names()]

    def open(self, name: str, file: str) -> StoredFile:
        return (self._memory if name in self._memory.names() else self._storage).open(name, file)

    def is_near(self, name: str) -> bool:
        """Return whether a checkpoint is in the memory of this host, which is that of all ranks."""
        return self._is_shared and name in self._memory.names()


def drop(memory: LocalStorage, is_dropped: Callable[[int, str], bool]) -> None:
    """Delete the snapshots whose step and name `is_dropped` accepts."""
    for step, name in names_by_step(memory.names()).items():
        if is_dropped(step, name):
            with suppress(OSError):
                memory.delete(name)
