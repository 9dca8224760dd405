"""Where checkpoints lie: the few verbs that a place must know. One place today: a folder (`checkpoint.local`).

    draft = storage.begin("step-00000480")        nothing is visible yet
    sink = draft.create("rank-00000.safetensors")
    sink.write(...); sink.close()                 durable when `close` returns
    draft.publish(manifest)                       all of it is there now, or none
    storage.names() --> [..., "step-00000480"]

On an object store `begin` names a prefix, `close` completes an upload, and `publish` puts the manifest, last, if there
is none yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lockstep.checkpoint.ownership import Owner

MANIFEST = "manifest.json"


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Appends all of it. Raises OSError; then the sink is closed."""

    def close(self) -> None:
        """Returns when the bytes are on the disk. Raises OSError."""


class Draft(Protocol):
    """A checkpoint that is being written, by all ranks, each its own files. Nobody takes it for a finished one."""

    def create(self, file: str) -> Sink:
        """Raises OSError."""

    def read(self, file: str) -> bytes:
        """A file that some rank has closed. Raises OSError."""

    def remove(self, file: str) -> None:
        """A file that some rank has closed. Raises OSError."""

    def publish(self, manifest: bytes) -> None:
        """By one rank, once: makes the checkpoint exist. Raises OSError: it doesn't exist then, or did so before."""

    def discard(self) -> None:
        """Removes what was written, as far as possible. Never raises."""


class Source(Protocol):
    """A file that is being read."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset` on. Raises OSError, also if the file ends before."""

    def close(self) -> None: ...


class Storage(Protocol):
    """A place for the checkpoints of one run."""

    @property
    def place(self) -> str:
        """For people."""

    def names(self) -> list[str]:
        """Of all that were published, whole or damaged since. Raises OSError."""

    def begin(self, name: str) -> Draft:
        """By every rank. Raises OSError."""

    def apart(self) -> Storage:
        """The same place; drafts begun there are none of those begun here."""

    def alone(self, name: str) -> AbstractContextManager[bool]:
        """Whether no other process is in such a block of `name`. Raises OSError."""

    def is_taken(self, name: str) -> bool:
        """Whether a process is in a block of `alone`."""

    def open(self, name: str, file: str) -> Source:
        """Raises OSError."""

    def reading(self, name: str) -> AbstractContextManager[None]:
        """While the block runs, nobody deletes it."""

    def delete(self, name: str) -> bool:
        """Whether it could be deleted: not while it is being read. Raises OSError."""

    def set_aside(self, name: str, why: str) -> str:
        """Renames it, so that `names` has it no more and people still find it; returns where it is. Raises OSError."""

    def claim(self) -> bool:
        """Whether this process alone saves here, from now on until it ends. Raises OSError."""

    def is_held(self) -> bool:
        """Whether what `claim` and `set_owner` have written is still there. Never raises."""

    @property
    def run(self) -> str | None:
        """Id of the run whose checkpoints these must be; None: nothing says."""

    def owner(self) -> Owner | None:
        """The run that this place belongs to, as far as it says. Never raises."""

    def set_owner(self, owner: Owner) -> None:
        """From now on it belongs to `owner`. Raises OSError."""

    def sweep(self) -> None:
        """Removes drafts that nobody will finish. Never raises."""

    def witness(self, token: str) -> AbstractContextManager[None]:
        """While the block runs, whoever can see this place `sees` the token. Raises OSError."""

    def sees(self, token: str) -> bool: ...


def read_whole(source: Source, most: int) -> bytes:
    """A small file. Raises OSError, also if it has more than `most` bytes."""
    if source.size > most:
        raise OSError(f"it has {source.size:,} bytes, where {most:,} at most can be")
    data = bytearray(source.size)
    source.read(0, memoryview(data))
    return bytes(data)
