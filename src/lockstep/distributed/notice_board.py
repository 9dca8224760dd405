"""The board on which ranks post notices for each other outside of collectives: the latest of each rank.

    rank 1   post(b"...")  --.
    rank 2   post(b"...")  --+--> store --> latest(): rank 0 reads all of them
                                            a rank that is stuck posts from a thread, so that the others see where

It has a connection of its own, so that its threads don't wait for others, nor others for them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from torch._C._distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ANNOUNCEMENT = "announcement"


class NoticeBoard:
    """The notices of a run's ranks, and an announcement of one of them to all.

    Args:
        store: The ranks' store; None: this rank is alone.
    """

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
        """Return each rank's notice; None for those that have posted none. Raises RuntimeError as `post`."""
        if (store := self._connected()) is not None:
            missing = [rank for rank in range(self._size) if rank not in self._known]
            self._known.update(rank for rank in missing if store.check([str(rank)]))
            known = sorted(self._known)
            for rank, notice in zip(known, store.multi_get([str(rank) for rank in known]), strict=True):
                self._latest[rank] = bytes(notice)
        return list(self._latest)

    def announce(self, notice: bytes) -> None:
        """Replace the announcement, which any rank may then read. Raises RuntimeError as `post`."""
        self._announced = notice
        if (store := self._connected()) is not None:
            store.set(_ANNOUNCEMENT, notice)

    def announced(self) -> bytes:
        """Return the announcement, for which it waits if there is none yet. Raises RuntimeError as `post`."""
        store = self._connected()
        return self._announced if store is None else bytes(store.get(_ANNOUNCEMENT))

    def _connected(self) -> Any:
        if self._store is None or self._size == 1:
            return None
        with self._lock:
            if self._own is None:
                self._own = PrefixStore("lockstep-notices", cast("Any", self._store).clone())
            return self._own
