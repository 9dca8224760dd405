"""Copies the newest part of a snapshot from the memory of the host before this one, in the background.

    host a -- copies --> host b -- copies --> host c -- copies --> host a         each in a thread of its relay

A quarter of the time at most is spent on it, so updates keep most of a link, and a slow one makes snapshots rarer: the
next one waits for the copies (`is_copied`). A copy that fails is tried again; training never waits for it.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from lockstep.checkpoint.host_parts import COPIES, OWN, PART, HostPart, parts_in
from lockstep.checkpoint.manifest import shard_file
from lockstep.checkpoint.storage import MANIFEST
from lockstep.launch.memory_serving import Address, RemoteMemory

REPORTS = ("reports.jsonl", "reports-before.jsonl")  # of `monitor.report_buffer`, on the first rank's host
_DRAFT = ".draft-"
_SHARE = 0.25  # of the time that copying may take
_CHUNK_BYTES = 2**20
_PAUSE_S = 0.05  # between two looks for a new part
_AGAIN_S = 1.0  # after which a connection is tried again
_NOTED_S = 10.0  # without a connection


class MemoryCopier(threading.Thread):
    """Copies from one host until it is stopped.

    Args:
        folder: This host's memory.
        source: The address of the other host's.
        note: Called with what the user should know.
    """

    def __init__(self, folder: Path, source: Address, key: bytes, note: Callable[[str], None]) -> None:
        super().__init__(name="copies", daemon=True)
        self._copies = folder / COPIES
        self._folder = folder
        self._source = source
        self._key = key
        self._note = note
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End soon, also in the middle of a copy."""
        self._stopped.set()

    def run(self) -> None:
        reached, noted = time.monotonic(), False
        while not self._stopped.is_set():
            try:
                with RemoteMemory(self._source, self._key) as memory:
                    while not self._stopped.wait(_PAUSE_S):
                        self._copy_newest(memory)
                        reached = time.monotonic()
            except OSError as error:
                if time.monotonic() - reached > _NOTED_S and not noted:
                    noted = True
                    place, why = f"{self._source[0]}:{self._source[1]}", error.strerror or error
                    self._note(f"no copies of snapshots from {place}: {why}; if that host is lost, so are they")
                self._stopped.wait(_AGAIN_S)

    def _copy_newest(self, memory: RemoteMemory) -> None:
        """Copy the newest part of the other host, if it is of a later snapshot than the copies that are here.

        A copy may be the only one of a lost host's part: it stays until one of a later snapshot is complete.
        """
        newest = max((part for part in memory.parts() if part.place == OWN), key=attrgetter("order"), default=None)
        if newest is None:
            return
        kept = [part for part in parts_in(self._folder) if part.place == COPIES]
        before = max((part for part in kept if part.run == newest.run), key=attrgetter("order"), default=None)
        if before is not None and newest.order <= before.order:
            return
        for part in kept:
            if part is not before:
                shutil.rmtree(self._copies / part.name, ignore_errors=True)
        draft = self._copies / f"{_DRAFT}{newest.name}"
        try:
            self._copy(memory, newest, draft)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _copy(self, memory: RemoteMemory, part: HostPart, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        self._copies.mkdir(exist_ok=True)
        draft.mkdir()
        for name in (*(shard_file(rank) for rank in part.ranks), PART, MANIFEST):
            self._copy_file(memory, OWN, f"{part.name}/{name}", draft / name)
        for name in REPORTS if 0 in part.ranks else ():
            with suppress(OSError):  # it doesn't exist
                self._copy_file(memory, "", name, draft / name)
        shutil.rmtree(self._copies / part.name, ignore_errors=True)  # of an earlier attempt
        draft.rename(self._copies / part.name)

    def _copy_file(self, memory: RemoteMemory, place: str, name: str, to: Path) -> None:
        size = memory.open(place, name)
        handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        chunk = memoryview(bytearray(min(size, _CHUNK_BYTES)))
        try:
            for offset in range(0, size, _CHUNK_BYTES):
                began = time.monotonic()
                data = chunk[: size - offset]
                memory.read(offset, data)
                while data:
                    data = data[os.write(handle, data) :]
                if self._stopped.wait((time.monotonic() - began) * (1 / _SHARE - 1)):
                    raise InterruptedError("the round has ended")
        finally:
            os.close(handle)


def is_copied(folder: Path, name: str) -> bool:
    """Return whether a host's memory has a copy of this snapshot's part of the host before it."""
    return (folder / COPIES / name).exists()


def is_copying(folder: Path) -> bool:
    """Return whether a copy is being made."""
    return any((folder / COPIES).glob(f"{_DRAFT}*"))


def remove_drafts(folder: Path) -> None:
    """Remove what a launcher that was killed has left unfinished."""
    for draft in (folder / COPIES).glob(f"{_DRAFT}*"):
        shutil.rmtree(draft, ignore_errors=True)
