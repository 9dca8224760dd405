"""Waits and failures of ranks over the process group's store, where a collective would time out or never end.

rank 1   raises  -> fail(): a key in the store, then its connections are closed --.
rank 0   in a collective, which raises "connection closed by peer" at once  <-----'
all      barrier(): however long it takes, unless a rank fails
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.core.errors import PeerFailed, RunFailed, named_ranks
from lockstep.distributed.rounds import poll

_WOKEN_S = 30.0  # seconds to wait for other ranks, which may be busy between two collectives
_NOT_WOKEN_S = 10.0  # the same where nothing interrupts a collective: for ranks that fail by themselves
_PAUSE_PER_RANK_S, _LONGEST_PAUSE_S = 0.002, 0.2  # between two looks of a rank in a barrier: a thousand looks a second
_FIRST_PAUSE_PER_RANK_S, _LONGEST_FIRST_PAUSE_S = 0.00005, 0.001  # the same at first
_numbers = itertools.count()  # process-wide: the exchanges of all sessions share the store
_log = logging.getLogger("lockstep")


class StoreExchange:
    """The exchange of one session. All ranks make their exchanges in the same order.

    Args:
        wakes: `fail` closes this rank's connections to its peers, so that their collectives fail.
        timeout: Seconds to wait for other ranks after they have met.
    """

    def __init__(self, store: Store, rank: int, size: int, *, wakes: bool, timeout: float) -> None:
        self._store = PrefixStore(f"lockstep-exchange-{next(_numbers)}", store)
        self._rank = rank
        self._all = range(size)
        self._wakes = wakes
        self._timeout = timeout
        self._meeting_timeout = min(timeout, _WOKEN_S if wakes else _NOT_WOKEN_S)
        self._barriers: Counter[tuple[int, ...]] = Counter()
        self._rounds: Counter[str] = Counter()

    def listen(self) -> None:
        """Post the addresses where this rank's groups listen; again when more groups have been made."""
        if self._wakes:
            self._store.set(f"listens/{self._rank}", json.dumps(sorted(_listening())))

    def fail(self) -> None:
        """Post that this rank fails, and make the collectives of its group fail."""
        with contextlib.suppress(RuntimeError):  # the first rank has ended, and its store with it
            self._store.set("failed", str(self._rank))
            self._disconnect()

    def barrier(self, ranks: Sequence[int]) -> None:
        """Wait until all of `ranks` have called this as often as this one has.

        Raises:
            PeerFailed: A rank has failed, or has ended.
        """
        key = tuple(ranks)
        self._barriers[key] += 1
        members = "all" if len(key) == len(self._all) else "-".join(map(str, key))
        name, size = f"barrier/{members}/{self._barriers[key]}", len(key)

        def is_over() -> bool:
            if self._store.check([f"{name}/all"]):
                return True
            if not self._store.check(["failed"]):
                return False
            if self._store.check([f"{name}/all"]):  # the last one came, left and failed between the two
                return True
            raise PeerFailed(f"rank {self._store.get('failed').decode()} has failed, while the others waited for it")

        try:
            if self._store.add(name, 1) == size:
                self._store.set(f"{name}/all", "")
            longest = min(size * _PAUSE_PER_RANK_S, _LONGEST_PAUSE_S)
            shortest = min(size * _FIRST_PAUSE_PER_RANK_S, _LONGEST_FIRST_PAUSE_S)
            while not poll(is_over, time.monotonic() + self._timeout, longest, shortest):
                number = self._store.add(name, 0)
                _log.warning("rank %d waits on: %d of %d ranks have come", self._rank, number, size)
            if self._store.add(f"{name}/left", 1) < size and self._rank == 0:  # the store may end with it
                until = time.monotonic() + self._meeting_timeout
                poll(lambda: self._store.add(f"{name}/left", 0) == size, until, longest, shortest)
        except RuntimeError as error:
            raise PeerFailed("rank 0, which keeps the ranks' store, has ended") from error

    def _disconnect(self) -> None:
        """Close the connections to peers, so that their collectives fail."""
        if self._wakes:
            keys = [f"listens/{rank}" for rank in self._all]
            posted = [self._store.get(key) for key in keys if self._store.check([key])]
            listeners = _listening() | {_address(address) for text in posted for address in json.loads(text)}
            for connection in _sockets():  # shut down, but its file stays open
                with contextlib.suppress(OSError):  # it isn't connected
                    if {_address(connection.getpeername()), _address(connection.getsockname())} & listeners:
                        connection.shutdown(socket.SHUT_RDWR)

    def meet(self, status: object) -> list[object]:
        """Return every rank's status after a collective has failed. Raises RunFailed if a rank doesn't answer."""
        self._disconnect()
        self._write("status", status)
        return self._read("status", self._all, self._meeting_timeout)

    def gather_if_all(self, ranks: Sequence[int], value: object) -> list[object]:
        """Return the value of each of `ranks`, at a point that some of them may not reach.

        Raises:
            RunFailed: Some don't, within half the collective timeout.
        """
        between = f"all/{'-'.join(map(str, ranks))}"
        self._rounds[between] += 1
        name = f"{between}/{self._rounds[between]}"
        self._write(name, value)
        return self._read(name, ranks, self._timeout / 2)

    def _write(self, name: str, value: object) -> None:
        self._store.set(f"{name}/{self._rank}", base64.b64encode(pickle.dumps(value)).decode())

    def _read(self, name: str, ranks: Sequence[int], seconds: float) -> list[object]:
        keys = [f"{name}/{rank}" for rank in ranks]
        self._wait(keys, seconds)
        return [pickle.loads(base64.b64decode(self._store.get(key))) for key in keys]

    def _wait(self, keys: list[str], seconds: float) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:  # torch's DistStoreError, or the store has ended
            try:
                missing = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
            except RuntimeError:
                raise PeerFailed("rank 0, which keeps the ranks' store, has ended") from error
            raise RunFailed(f"{named_ranks(missing)} did not answer within {seconds:g} s") from error


# --- this process's connections -----------------------------------------------------------------------------------

_Address = tuple[str, int]


def _listening() -> set[_Address]:
    """Return the addresses where this process listens, without the store's."""
    listeners = (item for item in _sockets() if item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    addresses = {_address(item.getsockname()) for item in listeners}
    return {address for address in addresses if address[1] != int(os.environ.get("MASTER_PORT", "0"))}


def _sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # it is no socket, or was closed
            handle = os.dup(int(name))
            try:
                connection = socket.socket(fileno=handle)
            except OSError:
                os.close(handle)
                continue
            with connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection


def _address(raw: Any) -> _Address:
    return cast("str", raw[0]).removeprefix("::ffff:"), cast("int", raw[1])
