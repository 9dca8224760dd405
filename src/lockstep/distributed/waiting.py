"""Wait for other ranks without the time limit of collectives, where one of them writes for as long as its disk takes.

    every rank    its value --> store; the last one of all posts `complete`
    first rank    waits for that, and posts all values; it keeps the store until all have read them
    others        wait for the values

A rank that ends without an answer ends the run: its launcher stops the others. The store is in the first rank's
process or its launcher's, and a wait ends with it.
"""

from __future__ import annotations

import base64
import itertools
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.core.errors import RunFailed

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis

_LOOK_S = 5.0  # seconds after which a wait returns to Python, for signals
_numbers = itertools.count()


def gather_slowly(axis: Axis, value: object) -> list[object]:
    """Return the value of each rank, in their order, however long it takes. All ranks of the run together."""
    if axis.size == 1:
        return [value]
    store = PrefixStore(f"lockstep-wait-{next(_numbers)}", dist.distributed_c10d._get_default_store())
    try:
        _post(store, str(axis.rank), value)
        _count(store, "arrived", axis.size)
        if axis.rank == 0:
            _wait(store, "arrived/all")
            values = [_read(store, str(rank)) for rank in range(axis.size)]
            _post(store, "values", values)
            _wait(store, "read/all")
            return values
        _wait(store, "values")
        values = cast("list[object]", _read(store, "values"))
        _count(store, "read", axis.size - 1)
        return values
    except dist.DistError as error:
        raise RunFailed("rank 0, which keeps the ranks' store, has ended while others waited for it") from error


def _post(store: Store, key: str, value: object) -> None:
    store.set(key, base64.b64encode(pickle.dumps(value)).decode())


def _read(store: Store, key: str) -> object:
    return pickle.loads(base64.b64decode(store.get(key)))


def _count(store: Store, key: str, ranks: int) -> None:
    """Count one more rank; the last one posts that all are there."""
    if store.add(key, 1) == ranks:
        store.set(f"{key}/all", "")


def _wait(store: Store, key: str) -> None:
    while True:
        try:
            store.wait([key], timedelta(seconds=_LOOK_S))
            return
        except dist.DistStoreError:  # not yet
            continue
