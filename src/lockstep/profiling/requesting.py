"""Asks a run that trains for traces of its next updates, from any host that shares its folder.

request.json --> the run's answer: updates 24 to 26, ranks 0 and 3 --> their files, one after the other
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.core.errors import RunFailed
from lockstep.monitor.attempts import holder_may_live, launched
from lockstep.monitor.folder import ATTEMPTS, held_by
from lockstep.monitor.rank_meters import LIVE
from lockstep.monitor.trace_requests import (
    PROFILE,
    REQUEST,
    TRACE_SUFFIX,
    TraceAnswer,
    TraceOptions,
    TraceRequest,
    read_answer,
)

_POLL_S = 0.2
_STALE_S = 60.0
_GRACE_S = 5.0  # for files of a run that has ended


def is_running(run: Path) -> bool:
    """Return whether a run trains: here by its lock, elsewhere by its live.json, which changes every 2 s."""
    if held_by(run) is not None:
        return True
    with suppress(OSError):
        return time.time() - (run / LIVE).stat().st_mtime < _STALE_S and holder_may_live(run)
    return False


def request_traces(
    run: Path, steps: int, options: TraceOptions, seconds: float, show: Callable[[TraceAnswer], None]
) -> list[Path]:
    """Let a run that trains record its next updates, and return the files.

    Args:
        seconds: To wait for the answer, and then again for the files.
        show: Receives the answer.

    Raises:
        RunFailed: The run refuses, ends meanwhile, or doesn't answer in time.
    """
    request = TraceRequest(uuid.uuid4().hex, steps, 1, options)
    if not _has_begun(run):  # it would move a request away with earlier files
        raise RunFailed(f"the run in {run} has not begun its first update: ask again when it trains")
    path = run / PROFILE / REQUEST
    _write(path, request)
    try:
        answer = _answer(run, request.name, seconds)
    finally:
        if _is_of(path, request.name):
            path.unlink(missing_ok=True)
    if answer.refusal is not None:
        raise RunFailed(f"{run} records no trace: {answer.refusal}")
    show(answer)
    return _files(run, answer, seconds)


def _has_begun(run: Path) -> bool:
    """Return whether the last launch has recorded its attempt, or its meters since."""
    start = launched(run)  # not known without a lock
    for name in (ATTEMPTS, LIVE):
        with suppress(OSError):
            if not (run / name).stat().st_mtime < start:
                return True
    return False


def _write(path: Path, request: TraceRequest) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"{request.name}.part")
        part.write_text(json.dumps(request.record()) + "\n")
        try:
            os.link(part, path)
        finally:
            part.unlink()
    except FileExistsError:
        raise RunFailed(f"another request is waiting in {path}; delete it if its command has ended") from None
    except OSError as error:
        raise RunFailed(f"can't write {path}: {error.strerror}") from error


def _is_of(path: Path, name: str) -> bool:
    try:
        return name in path.read_text()
    except OSError:
        return False


def _answer(run: Path, name: str, seconds: float) -> TraceAnswer:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        running = is_running(run)
        answer = read_answer(run)
        if answer is not None and answer.name == name:
            return answer
        if not running:
            raise RunFailed(f"the run in {run} has ended without an answer")
        time.sleep(_POLL_S)
    raise RunFailed(
        f"the run in {run} hasn't answered in {seconds:.0f} s: its updates are slower, it hangs, or it was killed on "
        "another host; read live.json and logs/ in its folder, or wait longer with --timeout"
    )


def _files(run: Path, answer: TraceAnswer, seconds: float) -> list[Path]:
    files = {rank: run / PROFILE / f"rank{rank}.{answer.first}{TRACE_SUFFIX}" for rank in answer.ranks}
    deadline, ended = time.monotonic() + seconds, None
    while missing := [rank for rank, file in files.items() if not file.is_file()]:
        now = time.monotonic()
        if ended is None and not is_running(run):
            ended = now
        names = ", ".join(map(str, missing))
        if ended is not None and now - ended > _GRACE_S:
            raise RunFailed(f"the run in {run} has ended before rank {names} recorded update {answer.first:,}")
        if now > deadline:
            raise RunFailed(
                f"no trace of rank {names} in {run / PROFILE} after {seconds:.0f} s: if its host doesn't share the "
                "folder, it is there on that host; if the run was started again, ask again; else raise --timeout"
            )
        time.sleep(_POLL_S)
    return list(files.values())
