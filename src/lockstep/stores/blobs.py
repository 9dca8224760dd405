"""The protocol of an object store as checkpoints need it, and a user's `ObjectStore` seen as one.

A user's store has five verbs. A `BlobStore` also sends a file in pieces, refuses to replace an object, and copies.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from lockstep.core.protocols import ObjectStore

_R = TypeVar("_R")


class BlobStore(Protocol):
    """Named objects. Every method may be called in any thread, and raises OSError."""

    @property
    def place(self) -> str:
        """Address, for messages."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of all objects with names that begin with `prefix`, in order of names."""

    def size(self, name: str) -> int:
        """Return the bytes of an object."""

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset`. Raises OSError, also if the object ends before."""

    def write(self, name: str, *pieces: memoryview) -> None:
        """Store or replace an object of these pieces: all of it is visible and durable then, or nothing."""

    def write_new(self, name: str, data: memoryview) -> None:
        """Store an object; raise FileExistsError if there is one of that name."""

    def copy(self, source: str, target: str) -> None:
        """Copy an object."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, the first before all others."""


def read_whole(store: BlobStore, name: str, limit: int | None = None) -> bytes:
    """Return the bytes of an object, `limit` at most. Raises OSError."""
    size = store.size(name)
    data = bytearray(size if limit is None else min(size, limit))
    store.read(name, 0, memoryview(data))
    return bytes(data)


class UserStore:
    """A user's store; its exceptions become OSErrors: a client has its own, and a save must survive them."""

    def __init__(self, store: ObjectStore) -> None:
        self.place = store.place
        self._names = _raising_os_errors(store.names)
        self.size = _raising_os_errors(store.size)
        self._read = _raising_os_errors(store.read)
        self._write = _raising_os_errors(store.write)
        self._delete = _raising_os_errors(store.delete)

    def sizes(self, prefix: str) -> dict[str, int]:
        return {name: self.size(name) for name in sorted(self._names(prefix))}

    def read(self, name: str, offset: int, into: memoryview) -> None:
        data = self._read(name, offset, len(into))
        if len(data) != len(into):
            raise ended_early(offset, len(data), len(into))
        into[:] = data

    def write(self, name: str, *pieces: memoryview) -> None:
        self._write(name, pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))  # it takes an object whole

    def write_new(self, name: str, data: memoryview) -> None:
        if name in self._names(name):
            raise FileExistsError(errno.EEXIST, "it exists", f"{self.place}/{name}")
        self._write(name, data)

    def copy(self, source: str, target: str) -> None:
        self._write(target, memoryview(self._read(source, 0, self.size(source))))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._delete(name)


def ended_early(offset: int, size: int, wanted: int) -> OSError:
    """Return the error for an object that has fewer bytes than it had when it was written."""
    return OSError(f"it ends at byte {offset + size:,}, {wanted - size:,} bytes too early")


def _raising_os_errors(method: Callable[..., _R]) -> Callable[..., _R]:
    def call(*arguments: Any) -> _R:
        try:
            return method(*arguments)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return call
