"""Checkpoints in an object store: a user's `ObjectStore` (S3, a database, memory), seen as a `Storage`.

step-00000240/rank-00000.safetensors, ...   written first
step-00000240/manifest.json                 written last: the checkpoint exists from now on
owner.json                                  the run whose checkpoints these are
superseded-step-00000360/...                moved aside
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lockstep.checkpoint import ownership
from lockstep.checkpoint.ownership import OWNER, Owner
from lockstep.checkpoint.storage import MANIFEST, MOVED_ASIDE, Storage, read_small

if TYPE_CHECKING:
    from lockstep.core.protocols import ObjectStore

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PUBLISHED, _MARKER = "step-", ".mark-"


class ObjectStorage:
    """An object store as a place for the checkpoints of one run.

    Nothing locks it: two runs are kept apart by the owner that each save reads again.

    Args:
        run: Id of the run that is known to own it; None: the one that `owner.json` names.
    """

    def __init__(self, store: ObjectStore, run: str | None = None) -> None:
        self._store = _OSErrorStore(store)
        self._run = run
        self._owned = False

    @property
    def place(self) -> str:
        return self._store.place

    @property
    def run(self) -> str | None:
        owner = self.owner() if self._run is None else None
        return owner.run if owner is not None else self._run

    def owner(self) -> Owner | None:
        with contextlib.suppress(OSError):
            return ownership.from_bytes(read_small(StoredObject(self._store, OWNER), ownership.MAX_BYTES))
        return None

    def set_owner(self, owner: Owner) -> None:
        self._run, self._owned = owner.run, True
        self._store.write(OWNER, memoryview(ownership.to_bytes(owner)))

    def names(self) -> list[str]:
        objects = self._store.names(_PUBLISHED)
        return sorted(name.removesuffix(f"/{MANIFEST}") for name in objects if name.endswith(f"/{MANIFEST}"))

    def moved_aside(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in self._store.names(""):
            folder = name.partition("/")[0]
            if MOVED_ASIDE.fullmatch(folder):
                sizes[folder] = sizes.get(folder, 0) + self._store.size(name)
        return dict(sorted(sizes.items()))

    def begin(self, name: str) -> ObjectDraft:
        return ObjectDraft(self._store, name)

    def with_separate_drafts(self) -> Storage:
        return self

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        if self.has_marker(name):
            yield False
            return
        with self.leave_marker(name):
            yield True

    def open(self, name: str, file: str) -> StoredObject:
        return StoredObject(self._store, f"{name}/{file}")

    @contextlib.contextmanager
    def read_lock(self, name: str) -> Iterator[None]:
        yield

    def delete(self, name: str) -> bool:
        self._delete(name)
        return True

    def move_aside(self, name: str, prefix: str) -> str:
        target, number = f"{prefix}-{name}", 2
        while self._store.names(f"{target}/"):
            target, number = f"{prefix}-{name}-{number}", number + 1
        for key in self._store.names(f"{name}/"):
            data = self._store.read(key, 0, self._store.size(key))
            self._store.write(f"{target}/{key.removeprefix(f'{name}/')}", memoryview(data))
        self._delete(name)
        return f"{self.place}/{target}"

    def claim(self) -> bool:
        return True

    def is_held(self) -> bool:
        return not self._owned or self.owner() is not None

    def remove_stale_drafts(self) -> None:
        with contextlib.suppress(OSError):
            published = set(self.names())
            for name in self._store.names(""):
                folder = name.partition("/")[0]
                if name.startswith(_MARKER) or (folder.startswith(_PUBLISHED) and folder not in published):
                    self._store.delete(name)

    @contextlib.contextmanager
    def leave_marker(self, token: str) -> Iterator[None]:
        self._store.write(f"{_MARKER}{token}", memoryview(b"1"))
        try:
            yield
        finally:
            self._store.delete(f"{_MARKER}{token}")

    def has_marker(self, token: str) -> bool:
        return f"{_MARKER}{token}" in self._store.names(f"{_MARKER}{token}")

    def _delete(self, name: str) -> None:
        """Delete the manifest first: without it the checkpoint no longer exists."""
        for key in sorted(self._store.names(f"{name}/"), key=lambda key: not key.endswith(MANIFEST)):
            self._store.delete(key)


class ObjectDraft:
    """A checkpoint that has no manifest yet."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name

    def write(self, file: str, *pieces: memoryview) -> None:
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))  # a user's store takes an object whole
        self._store.write(f"{self._name}/{file}", data)

    def read(self, file: str) -> bytes:
        key = f"{self._name}/{file}"
        return self._store.read(key, 0, self._store.size(key))

    def remove(self, file: str) -> None:
        self._store.delete(f"{self._name}/{file}")

    def publish(self, manifest: bytes) -> None:
        if self._is_published():
            raise FileExistsError(f"{self._store.place}/{self._name} exists")
        self.write(MANIFEST, memoryview(manifest))

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            if not self._is_published():
                for name in self._store.names(f"{self._name}/"):
                    self._store.delete(name)

    def _is_published(self) -> bool:
        return bool(self._store.names(f"{self._name}/{MANIFEST}"))


class StoredObject:
    """An object open for reading."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        self.size = store.size(name)

    def read(self, offset: int, into: memoryview) -> None:
        data = self._store.read(self._name, offset, len(into))
        if len(data) != len(into):
            raise OSError(f"it ends at byte {offset + len(data):,}, {len(into) - len(data):,} bytes too early")
        into[:] = data

    def close(self) -> None: ...


class _OSErrorStore:
    """A user's store, whose exceptions become OSErrors: a client has its own, and a save must survive them."""

    def __init__(self, store: ObjectStore) -> None:
        self.place = store.place
        self.names = _raising_os_errors(store.names)
        self.size = _raising_os_errors(store.size)
        self.read = _raising_os_errors(store.read)
        self.write = _raising_os_errors(store.write)
        self.delete = _raising_os_errors(store.delete)


def _raising_os_errors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return call
