"""A disk that fails on purpose: system calls of `checkpoint.local`, counted, and made to fail or end the process.

disk = Disk(folder, monkeypatch)
save(...)                          disk.calls == ["mkdir .draft-step-00000008 #1", "create .../rank-00000.json #1", ...]
disk.fault = ends(call)            nothing after this call happens; half of a write does
disk.fault = raises(call, EIO)     the call fails, and the process continues

`lose_power` removes from the folder what a power failure may remove: bytes that were not flushed, and names that were
not.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENOSPC, EIO = errno.ENOSPC, errno.EIO


class End(BaseException):
    """The process has ended: nothing in it catches this."""


class Ended(End):
    """A call after the process has ended."""


Fault = Callable[[str], None]


def ends(call: str) -> Fault:
    """End the process at this call, which does not happen."""

    def fault(made: str) -> None:
        if made == call:
            raise End

    return fault


def raises(call: str, number: int) -> Fault:
    def fault(made: str) -> None:
        if made == call:
            raise OSError(number, os.strerror(number))

    return fault


class Disk:
    """The operating system below one folder.

    Attributes:
        calls: Made so far, numbered by path: `write x/rank-00000.json #1`.
        fault: Called before each call; may raise.
        max_write: Bytes that one write takes; None: all.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fault: Fault = lambda call: None
        self.max_write: int | None = None
        self._folder = str(folder)
        self._made: Counter[str] = Counter()
        self._ended = False
        self._lock = threading.RLock()
        self._handles: dict[int, str] = {}
        self._unflushed: dict[str, None] = {}
        self._names: list[tuple[str, str | None]] = []  # (new, old or None): not yet flushed by their folders
        self._replaced: dict[str, bytes] = {}  # by renames among them
        self._os = {
            name: getattr(os, name)
            for name in ("open", "close", "write", "fsync", "preadv", "mkdir", "rename", "unlink", "rmdir", "listdir")
        }
        for name in self._os:
            patch.setattr(os, name, getattr(self, name))
        self._io_open = io.open
        patch.setattr(io, "open", self.read_through_io)

    def restart(self) -> None:
        """Start the machine again, without faults."""
        for handle in list(self._handles):
            self._os["close"](handle)
        self._handles.clear()
        self._ended, self.fault = False, lambda call: None
        self._unflushed.clear()
        self._names.clear()
        self._replaced.clear()

    def forget(self) -> None:
        """Forget the calls until now, and count from one again."""
        self.calls.clear()
        self._made.clear()

    def lose_power(self, *, names: bool) -> None:
        """Remove bytes that were not flushed; with `names`, also undo new names in folders that were not flushed."""
        self._ended, self.fault = False, lambda call: None
        for path in self._unflushed:
            if os.path.exists(path):
                os.truncate(path, 0)
        moved_back: dict[str, str] = {}
        for name, old in reversed(self._names) if names else ():
            new = moved_back.get(name, name)
            if old is not None and os.path.exists(new):
                self._os["rename"](new, old)
                if new in self._replaced:
                    with self._io_open(new, "wb") as file:
                        file.write(self._replaced.pop(new))
                    moved_back[new] = old
            elif os.path.isdir(new):
                shutil.rmtree(new)
            elif os.path.exists(new):
                self._os["unlink"](new)

    # --- the calls ------------------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._place(path, dir_fd)
        if place is None:
            return int(self._os["open"](path, flags, mode, dir_fd=dir_fd))
        makes = flags & os.O_CREAT and not os.path.exists(place)
        self._call("create" if flags & os.O_CREAT else "open", place)
        handle = int(self._os["open"](path, flags, mode, dir_fd=dir_fd))
        with self._lock:
            self._handles[handle] = place
            if makes:
                self._names.append((place, None))
        return handle

    def close(self, handle: int) -> None:
        place = self._handles.get(handle)
        if place is None:
            return self._os["close"](handle)
        try:
            self._call("close", place)
        finally:
            if not self._ended:
                self._handles.pop(handle)
                self._os["close"](handle)

    def write(self, handle: int, data: Any) -> int:
        place = self._handles.get(handle)
        if place is None:
            return int(self._os["write"](handle, data))
        with self._lock:
            self._unflushed[place] = None
        try:
            self._call("write", place)
        except Ended:
            raise
        except End:
            self._os["write"](handle, data[: len(data) // 2])
            raise
        return int(self._os["write"](handle, data[: self.max_write] if self.max_write else data))

    def fsync(self, handle: int) -> None:
        place = self._handles.get(handle)
        if place is not None:
            self._call("fsync", place)
        self._os["fsync"](handle)
        if place is None:
            return
        with self._lock:
            self._unflushed.pop(place, None)
            self._names = [(new, old) for new, old in self._names if os.path.dirname(new) != place]

    def preadv(self, handle: int, buffers: Any, offset: int) -> int:
        place = self._handles.get(handle)
        if place is not None:
            self._call("read", place)
        return int(self._os["preadv"](handle, buffers, offset))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._call("mkdir", place)
        self._os["mkdir"](path, mode, dir_fd=dir_fd)
        if place is not None:
            with self._lock:
                self._names.append((place, None))

    def rename(self, old: Any, new: Any) -> None:
        place = self._place(old, None)
        if place is not None:
            self._call("rename", place)
        if place is not None and os.path.isfile(new):
            with self._lock, self._io_open(new, "rb") as file:
                self._replaced[os.fspath(new)] = file.read()
        self._os["rename"](old, new)
        if place is None:
            return
        moved = os.fspath(new)
        with self._lock:
            self._unflushed = {_moved(path, place, moved): None for path in self._unflushed}
            self._names = [(_moved(new_name, place, moved), old_name) for new_name, old_name in self._names]
            self._names.append((moved, place))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._call("unlink", place)
        self._os["unlink"](path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._call("rmdir", place)
        self._os["rmdir"](path, dir_fd=dir_fd)

    def listdir(self, path: Any = ".") -> list[str]:
        place = self._place(path, None)
        if place is not None:
            self._call("list", place)
        return list(self._os["listdir"](path))

    def read_through_io(self, file: Any, *how: Any, **more: Any) -> Any:
        place = None if isinstance(file, int) else self._place(file, None)
        if place is not None:
            self._call("read", place)
        return self._io_open(file, *how, **more)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _call(self, verb: str, place: str) -> None:
        with self._lock:
            if self._ended:
                raise Ended
            call = f"{verb} {os.path.relpath(place, self._folder)}"
            self._made[call] += 1
            call = f"{call} #{self._made[call]}"
            self.calls.append(call)
            try:
                self.fault(call)
            except End:
                self._ended = True
                raise

    def _place(self, path: Any, dir_fd: int | None) -> str | None:
        """Return the path, if it is in the folder."""
        if dir_fd is not None:
            above = self._handles.get(dir_fd)
            return None if above is None else os.path.join(above, os.fspath(path))
        if isinstance(path, int):
            return self._handles.get(path)
        place = os.fspath(path)
        return place if isinstance(place, str) and place.startswith(self._folder) else None


def _moved(path: str, old: str, new: str) -> str:
    return new + path.removeprefix(old) if path == old or path.startswith(old + os.sep) else path
