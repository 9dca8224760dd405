"""Storage of checkpoints: the protocols that a folder (`local`) and an object store (`objects`) implement.

draft = storage.begin("step-00000480")                   nothing is visible yet
draft.write("rank-00000.safetensors", image)             durable when it returns
draft.publish(manifest)                                  all of it exists now, or nothing
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol

from lockstep.checkpoint.hashing import hash_bytes

MANIFEST, OWNER = "manifest.json", "owner.json"
SHORT_ID = 8  # characters of a run id that messages show
_MAX_OWNER_BYTES = 65_536
MOVED_ASIDE = re.compile(r"[a-z]+-step-[0-9]+(-[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that saves to a folder: its id, its own folder when it last started (None: without one), its name."""

    run: str
    folder: str | None
    recipe: str

    def __str__(self) -> str:
        return f"{self.recipe} in {self.folder}" if self.folder else f"{self.recipe} (run id {self.run[:SHORT_ID]})"


class Draft(Protocol):
    """A checkpoint that all ranks are writing, each its own files. Readers don't see it."""

    def write(self, file: str, *pieces: memoryview) -> None:
        """Write these pieces as one file, durably. Raises OSError."""

    def read(self, file: str) -> bytes:
        """Return a file that some rank has written. Raises OSError."""

    def remove(self, file: str) -> None:
        """Remove a file that some rank has written. Raises OSError."""

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint exist; on one rank, once. Raises OSError if it doesn't, or existed before."""

    def discard(self) -> None:
        """Remove what was written, as far as possible. Never raises."""


class StoredFile(Protocol):
    """A file that is being read."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset`. Raises OSError, also if the file ends before."""

    def close(self) -> None: ...


class ReadableStorage(Protocol):
    """A place with the checkpoints of one run, for reading."""

    @property
    def place(self) -> str:
        """Path or address, for messages."""

    @property
    def run(self) -> str | None:
        """Id of the run that must own the checkpoints; None: unknown."""

    def names(self) -> list[str]:
        """Return the names of all published checkpoints, damaged ones included. Raises OSError."""

    def open(self, name: str, file: str) -> StoredFile:
        """Open a file of a published checkpoint, or one beside them (name: ""). Raises OSError."""


class Storage(ReadableStorage, Protocol):
    """A place for the checkpoints of one run."""

    def moved_aside(self) -> Mapping[str, int]:
        """Return the bytes of each checkpoint that was moved aside, in order of names. Raises OSError."""

    def begin(self, name: str) -> Draft:
        """Begin a checkpoint; called by every rank. Raises OSError."""

    def with_separate_drafts(self) -> Storage:
        """Return the same place, with drafts that are distinct from those begun here."""

    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        """Enter a block that one process at a time runs; the value is whether it is this one. Raises OSError.

        Meanwhile `has_marker(name)` is true on all hosts that share this place.
        """

    def replace_manifest(self, name: str, manifest: bytes) -> None:
        """Replace the manifest of a published checkpoint: it always has the old or the new one. Raises OSError."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint. Raises OSError."""

    def move_aside(self, name: str, prefix: str) -> str:
        """Rename a checkpoint: no run resumes from it or deletes it. Return where it is. Raises OSError."""

    def claim(self) -> bool:
        """Reserve the place until `release`, or the process' end; return False if another has it. Raises OSError."""

    def release(self) -> None:
        """Give up what `claim` has reserved. Never raises."""

    def owner(self) -> Owner | None:
        """Return the run that this place belongs to, as far as recorded. Never raises."""

    def set_owner(self, owner: Owner) -> None:
        """Record that this place belongs to `owner`. Raises OSError."""

    def remove_stale_drafts(self) -> None:
        """Remove what earlier processes have left unfinished. Never raises."""

    def has_marker(self, name: str) -> bool: ...


def read_small(file: StoredFile, max_bytes: int) -> bytes:
    """Return the content of a file and close it. Raises OSError, also if it has more than `max_bytes`."""
    try:
        if file.size > max_bytes:
            raise OSError(f"it has {file.size:,} bytes; the limit is {max_bytes:,}")
        data = bytearray(file.size)
        file.read(0, memoryview(data))
        return bytes(data)
    finally:
        file.close()


def owner_bytes(owner: Owner) -> bytes:
    content = asdict(owner)
    return (json.dumps({**content, "xxh3_128": hash_bytes(json.dumps(content).encode())}, indent=2) + "\n").encode()


def read_owner(open_file: Callable[[], StoredFile]) -> Owner | None:
    """Return the owner that a file records; None if it can't be read, or is damaged."""
    try:
        data = read_small(open_file(), _MAX_OWNER_BYTES)
        content = json.loads(data)
        owner = Owner(str(content["run"]), content["folder"], str(content["recipe"]))
        return owner if owner_bytes(owner) == data and isinstance(owner.folder, str | None) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def names_by_step(names: Iterable[str]) -> Mapping[int, str]:
    """Return the names of checkpoints by step, in order of steps; without others such as `step-7`."""
    steps = {}
    for name in names:
        _, _, digits = name.partition("step-")
        if digits.isdecimal() and digits == f"{int(digits):08d}":
            steps[int(digits)] = name
    return dict(sorted(steps.items()))


def newest_step(storage: ReadableStorage) -> int | None:
    """Return the step of the newest checkpoint; None if there is none, or if the storage can't be read."""
    try:
        return max(names_by_step(storage.names()), default=None)
    except OSError:
        return None
