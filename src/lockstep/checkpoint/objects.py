"""Checkpoints in an object store: a bucket's address, or a user's `ObjectStore`, seen as a `Storage`.

step-00000240/rank-00000.safetensors, ...   written first
step-00000240/manifest.json                 written last: the checkpoint exists from now on
owner.json                                  the run that owns them
superseded-step-00000360/...                moved aside
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from lockstep.checkpoint.storage import MANIFEST, MOVED_ASIDE, OWNER, Owner, Storage, owner_bytes, read_owner
from lockstep.stores.blobs import BlobStore, read_whole

_PUBLISHED, _MARKER = "step-", ".mark-"
_AHEAD_BYTES = 2**22


class ObjectStorage:
    """An object store as a place for the checkpoints of one run.

    Nothing locks it: two runs are kept apart by the owner, which each save reads again.
    """

    def __init__(self, store: BlobStore, run: str | None = None) -> None:
        self._store = store
        self._run = run

    @property
    def place(self) -> str:
        return self._store.place

    @property
    def run(self) -> str | None:
        owner = self.owner() if self._run is None else None
        return owner.run if owner is not None else self._run

    def owner(self) -> Owner | None:
        return read_owner(lambda: StoredObject(self._store, OWNER))

    def set_owner(self, owner: Owner) -> None:
        self._run = owner.run
        self._store.write(OWNER, memoryview(owner_bytes(owner)))

    def names(self) -> list[str]:
        objects = self._store.sizes(_PUBLISHED)
        return sorted(name.removesuffix(f"/{MANIFEST}") for name in objects if name.endswith(f"/{MANIFEST}"))

    def moved_aside(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, size in self._store.sizes("").items():
            folder = name.partition("/")[0]
            if MOVED_ASIDE.fullmatch(folder):
                sizes[folder] = sizes.get(folder, 0) + size
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
        self._store.write(f"{_MARKER}{name}", memoryview(b"1"))
        try:
            yield True
        finally:
            self._store.delete([f"{_MARKER}{name}"])

    def open(self, name: str, file: str) -> StoredObject:
        return StoredObject(self._store, f"{name}/{file}".lstrip("/"))

    def replace_manifest(self, name: str, manifest: bytes) -> None:
        self._store.write(f"{name}/{MANIFEST}", memoryview(manifest))

    def delete(self, name: str) -> None:
        # the manifest first: without it the checkpoint no longer exists
        self._store.delete(sorted(self._store.sizes(f"{name}/"), key=lambda key: not key.endswith(MANIFEST)))

    def move_aside(self, name: str, prefix: str) -> str:
        target, number = f"{prefix}-{name}", 2
        while self._store.sizes(f"{target}/"):
            target, number = f"{prefix}-{name}-{number}", number + 1
        for key in self._store.sizes(f"{name}/"):
            self._store.copy(key, f"{target}/{key.removeprefix(f'{name}/')}")
        self.delete(name)
        return f"{self.place}/{target}"

    def claim(self) -> bool:
        return True

    def release(self) -> None:
        """Do nothing: an object store has no lock."""

    def remove_stale_drafts(self) -> None:
        with contextlib.suppress(OSError):
            names = self._store.sizes("")
            published = {name.partition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
            for name in names:
                folder = name.partition("/")[0]
                if name.startswith(_MARKER) or (folder.startswith(_PUBLISHED) and folder not in published):
                    self._store.delete([name])

    def has_marker(self, name: str) -> bool:
        return f"{_MARKER}{name}" in self._store.sizes(f"{_MARKER}{name}")


class ObjectDraft:
    """A checkpoint that has no manifest yet."""

    def __init__(self, store: BlobStore, name: str) -> None:
        self._store = store
        self._name = name

    def write(self, file: str, *pieces: memoryview) -> None:
        self._store.write(f"{self._name}/{file}", *pieces)

    def read(self, file: str) -> bytes:
        return read_whole(self._store, f"{self._name}/{file}")

    def remove(self, file: str) -> None:
        self._store.delete([f"{self._name}/{file}"])

    def publish(self, manifest: bytes) -> None:
        self._store.write_new(f"{self._name}/{MANIFEST}", memoryview(manifest))

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            names = self._store.sizes(f"{self._name}/")
            if f"{self._name}/{MANIFEST}" not in names:
                self._store.delete(names)


class StoredObject:
    """An object open for reading. A small read also gets what follows: a request takes longer than a few MiB."""

    def __init__(self, store: BlobStore, name: str) -> None:
        self._store = store
        self._name = name
        self.size = store.size(name)
        self._ahead = memoryview(b"")
        self._ahead_at = 0
        self._lock = threading.Lock()

    def read(self, offset: int, into: memoryview) -> None:
        if len(into) >= _AHEAD_BYTES // 2 or offset + len(into) > self.size:
            self._store.read(self._name, offset, into)
            return
        with self._lock:
            start = offset - self._ahead_at
            if start < 0 or start + len(into) > len(self._ahead):
                ahead = bytearray(min(_AHEAD_BYTES, self.size - offset))
                self._store.read(self._name, offset, memoryview(ahead))
                self._ahead, self._ahead_at, start = memoryview(ahead), offset, 0
            into[:] = self._ahead[start : start + len(into)]

    def close(self) -> None: ...
