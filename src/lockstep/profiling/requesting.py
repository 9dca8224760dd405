"""Asks a run that trains for traces of its next updates, by RUN/profile/request.json."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.config.training_sections import ProfileConfig
from lockstep.core.errors import RunFailed
from lockstep.core.formatting import counted
from lockstep.monitor.attempts import is_running, read_attempts
from lockstep.monitor.trace_requests import PROFILE, REQUEST, TRACE_SUFFIX

_POLL_S = 0.2
_GRACE_S = 5.0  # for files of a run that has ended


def request_traces(run: Path, options: ProfileConfig, seconds: float) -> list[Path]:
    """Let a run that trains record its next updates, as many as `options.steps` has, and return the files.

    Raises:
        RunFailed: It doesn't have such ranks, ends meanwhile, or the files don't come within `seconds`.
    """
    attempts = read_attempts(run)
    if not attempts:
        raise RunFailed(f"the run in {run} has not begun its first update: ask again when it trains")
    size = int(attempts[-1].number("ranks") or 1)
    ranks = range(size) if options.ranks == "all" else options.ranks
    if missing := [rank for rank in ranks if rank >= size]:
        raise RunFailed(f"{run} records no trace: the run has {counted(size, 'rank')}, and no rank {missing[0]}")
    before = {rank: _newest(run, rank) for rank in ranks}
    request = run / PROFILE / REQUEST
    own = _write(request, options.model_dump_json().encode())

    def is_waiting() -> bool:
        with suppress(OSError):
            return _identity(request) == own
        return False

    try:
        return _wait_for_files(run, before, seconds, is_waiting)
    finally:
        if is_waiting():
            request.unlink(missing_ok=True)


def _newest(run: Path, rank: int) -> tuple[int, Path] | None:
    files = (run / PROFILE).glob(f"rank{rank}.*{TRACE_SUFFIX}")
    return max(((file.stat().st_mtime_ns, file) for file in files), default=None)


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _write(path: Path, content: bytes) -> tuple[int, int]:
    """Return what tells the file from another one of that name."""
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:  # the run ignores it until it is whole
            file.write(content)
        return _identity(path)
    except FileExistsError:
        raise RunFailed(f"another request is waiting in {path}; delete it if its command has ended") from None
    except OSError as error:
        raise RunFailed(f"can't write {path}: {error.strerror}") from error


def _wait_for_files(
    run: Path, before: dict[int, tuple[int, Path] | None], seconds: float, is_waiting: Callable[[], bool]
) -> list[Path]:
    deadline, ended = time.monotonic() + seconds, None
    while True:
        now = time.monotonic()
        if ended is None and not is_running(run):
            ended = now
        waits, newest = is_waiting(), {rank: _newest(run, rank) for rank in before}
        if waits:  # a trace that has ended by now is another's
            before = newest
        missing = [rank for rank, trace in newest.items() if trace == before[rank]]
        if not missing:
            return [trace[1] for trace in newest.values() if trace is not None]
        names = ", ".join(map(str, missing))
        if ended is not None and now - ended > _GRACE_S:
            raise RunFailed(f"the run in {run} has ended before rank {names} recorded a trace")
        if now > deadline:
            raise RunFailed(
                f"no trace of rank {names} in {run / PROFILE} after {seconds:.0f} s: the run hangs, is slow, "
                "or that rank's host doesn't share the folder; see lockstep top, or wait longer with --timeout"
            )
        time.sleep(_POLL_S)
