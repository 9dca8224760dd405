"""The board where ranks post notices outside of collectives, also from a thread of a rank that is stuck.

It has a connection to the store of its own, so that its threads don't block others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from torch._C._distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ANNOUNCEMENT = "announcement"


class NoticeBoard:
    """The latest notice of each rank, and one announcement to all. `store` None: this is the only rank."""

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._own: Any = None  # a store; torch's stubs have neither `clone` nor bytes
        self._known: set[int] = set()
        self._latest: list[bytes | None] = [None] * size
        self._announced = b""
        self._lock = threading.Lock()

    def post(self, notice: bytes) -> None:
        """Replace this rank's notice. Raises RuntimeError if the store has ended."""
        self._latest[self._rank] = notice
        if (store := self._connected()) is not None:
            store.set(str(self._rank), notice)

    def latest(self) -> list[bytes | None]:
        """Return each rank's notice, or None. Raises RuntimeError if the store has ended."""
        if (store := self._connected()) is not None:
            missing = [rank for rank in range(self._size) if rank not in self._known]
            self._known.update(rank for rank in missing if store.check([str(rank)]))
            known = sorted(self._known)
            for rank, notice in zip(known, store.multi_get([str(rank) for rank in known]), strict=True):
                self._latest[rank] = bytes(notice)
        return list(self._latest)

    def announce(self, notice: bytes) -> None:
        """Replace the announcement that any rank may read. Raises RuntimeError if the store has ended."""
        self._announced = notice
        if (store := self._connected()) is not None:
            store.set(_ANNOUNCEMENT, notice)

    def announced(self) -> bytes:
        """Return the announcement; wait if there is none yet. Raises RuntimeError if the store has ended."""
        store = self._connected()
        return self._announced if store is None else bytes(store.get(_ANNOUNCEMENT))

    def _connected(self) -> Any:
        if self._store is None or self._size == 1:
            return None
        with self._lock:
            if self._own is None:
                self._own = PrefixStore("lockstep-notices", cast("Any", self._store).clone())
            return self._own
