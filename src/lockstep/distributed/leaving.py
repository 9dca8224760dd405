"""Leaving the process group.

the block has ended, or the run has paused      destroy: every collective has ended on all ranks
any other exception, Ctrl-C, sys.exit()         report, then abort: a collective may wait for ranks that never come

`destroy_process_group` waits for pending collectives: on a rank that fails, until the timeout of the slowest, and the
exception is not reported until then. Aborting ends them; yet it, too, may hang, in a driver or a network that is
broken. So the failure is reported first, and the wait for the abort has a limit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lockstep.core.errors import (
    CollectiveTimeout,
    Paused,
    RunFailed,
    Stopped,
    blames_a_peer,
    message_of,
    report_failure,
)

if TYPE_CHECKING:
    from lockstep.distributed.store_exchange import StoreExchange

_ABORT_LIMIT = 10.0  # seconds that an abort may take
_log = logging.getLogger("lockstep")


def is_orderly(error: BaseException) -> bool:
    """Return whether an exception is raised by all ranks after the same collective, so that none is pending."""
    return isinstance(error, Paused)


def abort_groups(error: BaseException, rank: int, device: torch.device, exchange: StoreExchange | None) -> None:
    """Report the error, abort all process groups, and return, even if they can't be closed.

    Args:
        exchange: Closes the connections of a gloo group, which has no abort: what waits there fails then.
    """
    if dist.get_backend() != "gloo" and not report_failure(error) and dist.get_world_size() > 1:
        reason = message_of(error).strip() or "no message"
        _log.error("rank %d fails, and aborts its collectives: %s: %s", rank, type(error).__name__, reason)
    global _aborting
    by_others = isinstance(error, CollectiveTimeout | Stopped) or blames_a_peer(error)
    reached = None if by_others else exchange  # they know, and rank 0, which keeps the store, may have ended
    _aborting = _in_background(lambda: _abort(device, reached))
    if not _aborting.wait(_ABORT_LIMIT):
        _log.error("rank %d: the process group could not be closed within %g s", rank, _ABORT_LIMIT)


_aborting: threading.Event | None = None
"""Set when the last abort has ended. Process-wide, as torch's process group."""


def is_aborting() -> bool:
    """Return whether an abort has not ended: no other code may use the process group then."""
    return _aborting is not None and not _aborting.is_set()


def refuse_unfinished_abort() -> None:
    """Raise RunFailed if an abort has not ended: torch has one process group, which can't be used any more."""
    if is_aborting():
        raise RunFailed("the process group of a run that failed in this process could not be closed; start a new one")


def _abort(device: torch.device, exchange: StoreExchange | None) -> None:
    if dist.get_backend() == "gloo":
        if exchange is not None:
            exchange.fail()
        dist.destroy_process_group()
        return
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)  # a thread begins with the first one
    try:
        # torch's public API aborts a single group; this one aborts all, in the order that NCCL needs
        dist.distributed_c10d._abort_process_group()
    except RuntimeError:  # the backend has none
        dist.destroy_process_group()
    if exchange is not None:
        exchange.fail()


def _in_background(action: Callable[[], None]) -> threading.Event:
    """Run an action in a thread that doesn't keep the process alive; return an event that is set when it has ended."""
    ended = threading.Event()

    def run() -> None:
        try:
            with contextlib.suppress(Exception):  # nothing depends on it: the process, or its connection, ends
                action()
        finally:
            ended.set()

    threading.Thread(target=run, name="abort process groups", daemon=True).start()
    return ended
