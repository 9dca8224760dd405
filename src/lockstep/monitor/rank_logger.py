"""A logger for each rank of any program: every rank's lines in a file of its own, one rank's on the console."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from lockstep.core.errors import ConfigError
from lockstep.distributed.user_collectives import rank_and_size

_FORMAT = "%(asctime)s %(levelname)-7s rank {rank}/{size} %(name)s: %(message)s"


def rank_logger(
    name: str = "train",
    folder: str | os.PathLike[str] | None = None,
    level: int | str = "INFO",
    *,
    console: int | None = 0,
    max_bytes: int = 10_000_000,
    backups: int = 3,
) -> logging.Logger:
    """Return this rank's logger; each line has time, level, rank and number of ranks.

    A second call with the same name replaces the handlers of the first.

    Args:
        name: Of the logger, for `logging.getLogger`.
        folder: For rank-0.log, rank-1.log, ...; None: no files.
        level: Such as INFO or logging.DEBUG.
        console: The rank that also prints to standard error; None: no rank does.
        max_bytes: Size at which a file is renamed to rank-0.log.1, and begun again.
        backups: Number of renamed files to keep.

    Raises:
        ConfigError: The level is unknown, `console` is no rank, or the folder can't be written.
    """
    rank, size = rank_and_size()
    if console is not None and not 0 <= console < size:
        there = f"there are ranks 0 to {size - 1}" if size > 1 else "there is rank 0 alone"
        raise ConfigError(f"rank_logger(console={console}): {there}; console=None prints on no rank")
    logger = logging.getLogger(name)
    try:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    except ValueError:
        levels = ", ".join(logging.getLevelNamesMapping())
        raise ConfigError(f"there is no log level {level!r}; there are {levels}") from None
    handlers: list[logging.Handler] = []
    if folder is not None:
        path = Path(folder) / f"rank-{rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(RotatingFileHandler(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"can't write the log {path}: {error.strerror or error}") from None
    if console == rank:
        handlers.append(logging.StreamHandler(sys.stderr))
    formatter = logging.Formatter(_FORMAT.format(rank=rank, size=size))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.propagate = False  # the root logger would print on every rank
    return logger
