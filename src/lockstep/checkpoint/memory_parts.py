"""Snapshots in memory, from which a run may resume as well as from the checkpoints of its storage.

On several hosts each has a part in its memory: the files of its own ranks, and a manifest that lists them.

    host a   checkpoints/step-00000470/ manifest.json, rank-00000.safetensors
    host b   checkpoints/step-00000470/ manifest.json, rank-00001.safetensors

A run resumes from one if every host has the part of its present ranks, all written by the same attempt: each rank reads
the file that it wrote, and passes on what others hold, too (`shared_reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import CorruptCheckpoint, shard_file
from lockstep.checkpoint.reading import manifest_bytes
from lockstep.checkpoint.storage import names_by_step

if TYPE_CHECKING:
    from lockstep.checkpoint.local import LocalStorage
    from lockstep.checkpoint.storage import Storage, StoredFile

ATTEMPT = "attempt"
"""Key of a manifest's environment: what identifies the attempt of the run that wrote the part."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """A host's part of a snapshot of `ranks` ranks on all hosts: the manifest's entries of its files, by name."""

    run: str
    attempt: str
    step: int
    ranks: int
    files: Mapping[str, Any]


def parts_in(memory: LocalStorage, ranks: range) -> list[HostPart]:
    """Return the snapshots in a host's memory that have the files of all these ranks."""
    parts = []
    for name in names_by_step(memory.names()).values():
        with suppress(CorruptCheckpoint, KeyError):  # KeyError: other ranks' files
            body = manifests.intact_body(manifest_bytes(memory, name))
            files = {file: body["files"][file] for file in map(shard_file, ranks)}
            parts.append(HostPart(body["run"], body["environment"][ATTEMPT], body["step"], body["ranks"], files))
    return parts


def files_of_whole(
    hosts: Sequence[Sequence[HostPart]], run: str, is_valid: Callable[[str, int], bool]
) -> dict[int, dict[str, Any]]:
    """Return the files of each snapshot that is complete on the hosts together, by step.

    Args:
        hosts: The parts of each host.
        is_valid: Whether the run may resume from what an attempt wrote at a step.
    """
    whole = {}
    for first in hosts[0]:
        alike = [part for parts in hosts for part in parts if (part.step, part.attempt) == (first.step, first.attempt)]
        files = {name: entry for part in alike if part.run == run for name, entry in part.files.items()}
        if len(files) == first.ranks and is_valid(first.attempt, first.step):
            whole[first.step] = files
    return whole


class WithMemory:
    """Reads checkpoints from memory, and those that aren't there from a storage.

    Args:
        memory: This host's. `names` deletes what the storage has, too; rank 0 calls it before any rank opens one.
        is_shared: Whether the memory is shared by all ranks.
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
