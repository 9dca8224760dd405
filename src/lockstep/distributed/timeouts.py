"""The time limit of collectives, and the error when it is exceeded.

launch.timeout --> the group of all ranks       process_group
               \\-> every group made after it    torch's default, for nobody asks DeviceMesh, FSDP or DeepSpeed
in vain        --> the backend's RuntimeError --> CollectiveTimeout, one sentence
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from lockstep.core.errors import CollectiveTimeout, Failure, timeout_message

# What gloo and torch's store say of a wait that was too long. NCCL's watchdog ends the process, and nothing is raised.
_IN_VAIN = re.compile(
    r"Timed out waiting \d+ms for (recv|send) operation|Application timeout caused pair closure"
    r"|wait timeout after \d+ms"
)


@contextmanager
def collective_timeout(seconds: float, rank: int) -> Iterator[None]:
    """Limit the collectives of all groups that are made while the block runs.

    Raises:
        CollectiveTimeout: not all ranks came to a collective in that time.
    """
    with _default(timedelta(seconds=seconds)):
        try:
            yield
        except Failure:
            raise
        except Exception as error:
            if not is_timeout(error):
                raise
            raise CollectiveTimeout(timeout_message("another rank", f"rank {rank}", seconds)) from error


@contextmanager
def _default(limit: timedelta) -> Iterator[None]:
    """Set torch's default timeout of process groups, which is private: no call sets it for groups made by others."""
    c10d = cast("Any", dist.distributed_c10d)
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def is_timeout(error: BaseException | None) -> bool:
    """Return whether an error, or what it was raised from, is a collective's timeout."""
    while error is not None:
        if isinstance(error, RuntimeError) and _IN_VAIN.search(str(error)):
            return True
        error = error.__cause__
    return False
