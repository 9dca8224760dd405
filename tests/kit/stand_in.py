"""A stand-in for NCCL: a backend for one type of device, whose end waits for collectives that are pending.

A collective is done when all ranks have called it, and pending until then. `shutdown`, which `destroy_process_group`
calls, waits for pending ones; `abort` doesn't.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from lockstep.config.schema import Launch
from lockstep.distributed import process_group
from lockstep.distributed.process_group import World

NAME = "standin"


class StandIn(dist.ProcessGroup):
    """The group of a rank.

    Attributes:
        aborted: Whether `abort` was called.
    """

    made: ClassVar[list[StandIn]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._own, self._all = store, rank, size
        self._number = 0
        self._pending = 0
        self._change = threading.Condition()
        self.aborted = False
        StandIn.made.append(self)

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return NAME

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        self._number += 1
        key = f"sum/{self._number}"
        with self._change:
            self._pending += 1
        self._store.set(f"{key}/{self._own}", "")
        others = [f"{key}/{rank}" for rank in range(self._all)]
        done: Any = torch.futures.Future()

        def wait() -> None:
            while not self.aborted and not self._store.check(others):
                threading.Event().wait(0.01)
            with self._change:
                self._pending -= 1
                self._change.notify_all()
            if self.aborted:
                done.set_exception(RuntimeError("aborted"))
            else:
                done.set_result(tensors)

        threading.Thread(target=wait, daemon=True).start()
        return _Work(done)

    def shutdown(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._pending == 0, timeout=60.0)

    def abort(self) -> None:
        self.aborted = True
        self.shutdown()


class _Work(dist.Work):
    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        self._future.wait()
        return True

    def get_future(self) -> Any:
        return self._future


@contextmanager
def joined(backend: str = NAME) -> Iterator[World]:
    """Join the other ranks, which compute on the CPU, over the backend that takes no tensors of it."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StandIn, devices=["cuda"])
    chosen = patch.object(process_group, "choose_backend", lambda requested, device: requested)
    with chosen, process_group.joined(Launch(timeout=60.0, backend=backend), grouped=True) as world:
        yield world
