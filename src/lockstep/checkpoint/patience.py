"""Repeats a call to a folder's file system that may answer again soon: a server, a mount or a link is gone for a while.

call --> OSError of a file system that is gone --> again after 0.1 s, 0.2 s, ... 5 s, until the time is over
         any other OSError, such as a full disk --> raised
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

_R = TypeVar("_R")
_log = logging.getLogger("lockstep.checkpoint")
_GONE = {
    number
    for number, name in errno.errorcode.items()
    if name
    in (
        "EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENOTCONN",
        "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ESHUTDOWN", "ENODEV", "ENXIO", "EROFS", "ENOLINK", "EPROTO",
    )
}  # fmt: skip
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


def repeated(call: Callable[[], _R], seconds: float, place: object) -> _R:
    """Return what `call` returns; while its file system is gone, repeat it for that long. Raises OSError.

    Args:
        place: What is read or written, for the warning.
    """
    began, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            result = call()
        except OSError as error:
            if error.errno not in _GONE or time.monotonic() - began + pause > seconds:
                raise
            if pause == _FIRST_PAUSE_S:
                reason = error.strerror or str(error)
                _log.warning("%s: %s; it is tried again for %g s (checkpoint.retry_seconds)", place, reason, seconds)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        else:
            return result
