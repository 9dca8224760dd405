"""The lock of a run in a bucket: one object, created only if there is none, and replaced only as it was read.

s3://bucket/digits/run.lock    who trains the run; its holder renews it every 15 s
    none                       taken
    renewed meanwhile          refused: the run is running
    a process of this machine  running: refused; ended: taken over
    not renewed for 60 s       its machine is gone: taken over

No clock is compared with another machine's: a holder is gone if its lock stays the same while this process waits.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import RunFailed
from lockstep.core.processes import machine

if TYPE_CHECKING:
    from lockstep.stores.s3 import S3Store

LOCK = "run.lock"
RENEWED_S = 15.0
GONE_S = 60.0
_POLL_S = 1.0


class StoreLock:
    """The lock of the run in a store, as this process or one that it has started holds it.

    Args:
        token: That of the holder; None: it isn't held yet.
    """

    def __init__(self, store: S3Store, token: str | None = None) -> None:
        self._store = store
        self.token = token

    def take(self, show: Callable[[str], None]) -> None:
        """Take the lock; wait for a minute if that is how its holder is known to be gone.

        Args:
            show: Called with the reason for waiting.

        Raises:
            OSError: The store fails.
            RunFailed: The run is running.
        """
        token = uuid.uuid4().hex
        data = json.dumps({"token": token, "renewals": 0, **_this_process()}).encode()
        while True:
            try:
                self._store.write_new(LOCK, memoryview(data))
            except FileExistsError:
                if not self._take_over(data, show):
                    continue
            self.token = token
            return

    def holder(self) -> tuple[str, bool | None] | None:
        """Return who holds the lock, and whether that process lives, as far as it is known; None: it is free.

        Raises OSError.
        """
        holder, tag = self._read()
        return (described(holder), _lives(holder)) if tag else None

    def is_held(self) -> bool:
        """Return whether the lock is still this process's. Raises OSError."""
        return self._read()[0].get("token") == self.token

    def renew(self) -> bool:
        """Show that the holder lives; return False if the lock is another process's by now. Raises OSError."""
        holder, tag = self._read()
        if holder.get("token") != self.token:
            return False
        renewed = {**holder, "renewals": int(holder.get("renewals", 0)) + 1}
        try:
            self._store.replace(LOCK, json.dumps(renewed).encode(), tag)
        except FileExistsError:
            return False
        return True

    def release(self) -> None:
        """Delete the lock, if it is still held. Raises OSError."""
        if self.token is not None and self.is_held():
            self._store.delete([LOCK])
        self.token = None

    def give_up(self) -> None:
        """Delete the lock that this process has just taken. Never raises."""
        with suppress(OSError):
            if self.token is not None:
                self._store.delete([LOCK])
        self.token = None

    def _take_over(self, data: bytes, show: Callable[[str], None]) -> bool:
        """Replace the lock of a process that is gone; return False if it was released meanwhile.

        Raises RunFailed if the holder lives.
        """
        holder, tag = self._read()
        if not tag:
            return False
        lives = _lives(holder)
        if lives is None:
            show(f"{self._store.place} is locked by {described(holder)}; waiting {GONE_S:g} s to see whether it lives")
            waited = time.monotonic()
            while time.monotonic() - waited < GONE_S and not lives:
                time.sleep(_POLL_S)
                now = self._read()[1]
                if not now:
                    return False
                lives = now != tag
        if not lives:
            with suppress(FileExistsError):
                self._store.replace(LOCK, data, tag)
                return True
            holder = self._read()[0]
        raise RunFailed(
            f"the run in {self._store.place} is running ({described(holder)}); give run.folder another name"
        )

    def _read(self) -> tuple[Mapping[str, Any], str]:
        """Return what the lock states, and its tag; an empty tag if there is none. Raises OSError."""
        try:
            data, tag = self._store.read_tagged(LOCK)
        except FileNotFoundError:
            return {}, ""
        with suppress(ValueError):
            holder = json.loads(data)
            if isinstance(holder, dict):
                return holder, tag
        return {}, tag


def described(holder: Mapping[str, Any]) -> str:
    """Return who holds a lock, for messages."""
    return str(holder.get("holder", "another process"))[:200]


def _this_process() -> dict[str, Any]:
    process, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {process} on {socket.gethostname()}, since {since}"
    return {"holder": text, "machine": machine(), "process": process, "started": _started(process)}


def _lives(holder: Mapping[str, Any]) -> bool | None:
    """Return whether the process that took a lock lives; None: it is another machine's, or unknown."""
    process = holder.get("process")
    if not isinstance(process, int) or not machine() or holder.get("machine") != machine():
        return None
    started = _started(process)
    return bool(started) and started == holder.get("started")


def _started(process: int) -> str:
    """Return when a process was started, in ticks since the boot; empty if it has ended."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = status.rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
