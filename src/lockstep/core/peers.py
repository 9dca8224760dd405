"""Errors of one rank that the end of another rank explains."""

from __future__ import annotations

import re

# What gloo, NCCL and torch's store say when it is the other side that went away.
_PEER_WENT_AWAY = re.compile(
    r"gloo/transport/|Connection (closed|reset) by|Broken pipe|Socket closed|recvValue failed|sendBytes failed"
    r"|NCCL communicator was aborted|ncclRemoteError|remote process exited|failed to recv, got 0 bytes",
    re.IGNORECASE,
)


def blames_a_peer(error: BaseException | None) -> bool:
    """Whether the error, or what it was raised from, was reported about the other side of a connection."""
    while error is not None:
        if isinstance(error, RuntimeError | OSError) and _PEER_WENT_AWAY.search(str(error)):
            return True
        error = error.__cause__
    return False
