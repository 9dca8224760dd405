"""Warnings of Lockstep's loggers on standard error, where the program hasn't configured logging.

getLogger("lockstep.data").warning("reading sample 17 failed once") --> lockstep: reading sample 17 failed once
"""

from __future__ import annotations

import logging
import sys

from lockstep.core.terminal import echo


class _OnStandardError(logging.Handler):
    """Prints what Python would print without a prefix: a handler of the program's own has the record instead."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            echo(f"lockstep: {self.format(record)}", file=sys.stderr, flush=True)


def prefix_warnings() -> None:
    """Print warnings as all other messages, also in the processes that this one forks."""
    logger = logging.getLogger("lockstep")
    if not any(isinstance(handler, _OnStandardError) for handler in logger.handlers):
        logger.addHandler(_OnStandardError(logging.WARNING))
