"""The time limit of collectives, and the error when it is exceeded.

launch.timeout --> the group of all ranks       process_group
               \\-> every group made after it    torch's default, since DeviceMesh, FSDP and DeepSpeed set none
exceeded       --> the backend's RuntimeError --> CollectiveTimeout, one sentence
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from lockstep.core.errors import CollectiveTimeout, Failure, timeout_message

# The messages of gloo and of torch's store. NCCL's watchdog ends the process instead of raising.
_TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms for (recv|send) operation|Application timeout caused pair closure"
    r"|wait timeout after \d+ms"
)


@contextmanager
def collective_timeout(seconds: float, rank: int) -> Iterator[None]:
    """Limit the collectives of all groups that are made while the block runs.

    Raises:
        CollectiveTimeout: Not all ranks joined a collective in that time.
    """
    c10d = cast("Any", dist.distributed_c10d)  # torch's default is private: no call sets it for groups made by others
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        if not is_timeout(error):
            raise
        raise CollectiveTimeout(timeout_message("another rank", f"rank {rank}", seconds)) from error
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def is_timeout(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is a collective's timeout."""
    while error is not None:
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            return True
        error = error.__cause__
    return False
