"""The output of ranks: terminal and logs.

    rank 0    sys.stdout, sys.stderr --> the terminal, as it is (isatty holds) and logs/rank-0.log
    others    file descriptors 1, 2  --> logs/rank-N.log; their warnings and errors are shown at the end

Rank 0 keeps its terminal: its streams are doubled in Python, so what C++ code prints there shows on the terminal alone,
and so does what is drawn on `sys.__stdout__` (a progress display, which nobody wants in a log file).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO, cast

from lockstep.core.files import append_to, copy_rest, is_missing, reopened
from lockstep.core.secrets import masked, secrets_in
from lockstep.monitor.folder import lock_holder

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)")
_REMARK = re.compile(r"\b\w*(Warning|Error|WARNING|ERROR|CRITICAL)\b")
_REMARKS_SHOWN = 10


def log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


class _Logging:
    """A text stream as it is written to a log: without colors and cursor movements, and without secrets. A log that
    can't be written costs its lines, not the run.

    Args:
        report: called once with the reason, when the first line is lost.
    """

    def __init__(self, log: TextIO, report: Callable[[OSError], None] = lambda error: None) -> None:
        self._log = log
        self._secrets = secrets_in(os.environ)
        self._report = report
        self._lost = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._log.write(masked(_ESCAPES.sub("", text), self._secrets)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(self._log.flush)

    def close(self) -> None:
        self._attempt(self._log.close)

    def fileno(self) -> int:
        return self._log.fileno()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if not self._lost:
                self._lost = True
                self._report(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


class _Doubled:
    """A text stream whose words are also written to a log: first to the stream, then to the log."""

    def __init__(self, stream: TextIO, log: _Logging) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        finally:
            self._log.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # isatty, fileno, encoding, buffer, ...: the terminal's


class _OpenLog:
    """The file behind a log, which may be deleted while the run goes on.

    Args:
        handles: that lead to it; each is made to lead to the file that is made again.
    """

    def __init__(self, path: Path, *handles: int) -> None:
        self._path = path
        self._handles = handles
        self._run = path.parent.parent
        self._holder = lock_holder(self._run)

    def reopen(self) -> None:
        """Raises OSError."""
        if not is_missing(self._path) or not self._path.parent.is_dir() or lock_holder(self._run) != self._holder:
            return  # the first rank makes the folder, unless it is another run's
        old = os.dup(self._handles[0])
        try:
            new = reopened(self._path, old)
            end = os.fstat(new).st_size
            for handle in self._handles:
                os.dup2(new, handle, inheritable=handle in (1, 2))
            copy_rest(old, new, end)  # what was printed meanwhile
            os.close(new)
        finally:
            os.close(old)


_open_logs: list[_OpenLog] = []


def reopen() -> None:
    """Recreate this process's log with its contents if it was deleted. Callable from any thread."""
    for log in list(_open_logs):
        with suppress(OSError):
            log.reopen()


@contextmanager
def doubled(path: Path | None) -> Iterator[None]:
    """Write rank 0's output to its terminal and append it to `path`."""
    log = _opened(path, sys.stderr) if path is not None else None
    if path is None or log is None:
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Doubled(stream, log)) for stream in before)
    kept = _OpenLog(path, log.fileno())
    _open_logs.append(kept)
    try:
        yield
    finally:
        _open_logs.remove(kept)
        sys.stdout, sys.stderr = before
        log.close()


def _opened(path: Path, terminal: TextIO) -> _Logging | None:
    def report(error: OSError) -> None:
        with suppress(OSError, ValueError):
            terminal.write(_lost(path, error))
            terminal.flush()

    try:
        return _Logging(open(append_to(path), "w", buffering=1, encoding="utf-8", errors="backslashreplace"), report)
    except OSError as error:
        report(error)
        return None


def redirect(path: Path) -> None:
    """Append all that this process prints from now on to `path`, output of C++ code included. If it can't be written,
    that is reported once on the terminal, and output is lost."""
    terminal = os.dup(2)
    try:
        file = append_to(path)
    except OSError as error:
        _report_on(terminal, path, error)
        file = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    _open_logs[:] = [_OpenLog(path, 1, 2)]
    # the old ones may be buffered, or not on 1 and 2 at all
    report = partial(_report_on, terminal, path)
    sys.stdout, sys.stderr = (cast(TextIO, _Logging(_line_stream(descriptor), report)) for descriptor in (1, 2))


def _report_on(terminal: int, path: Path, error: OSError) -> None:
    with suppress(OSError):
        os.write(terminal, _lost(path, error).encode())


def _lost(path: Path, error: OSError) -> str:
    return f"lockstep: {path} can't be written: {error.strerror or error}; the run continues without this log\n"


def sizes(logs: Path, ranks: int) -> list[int]:
    """Return the bytes of every rank's log, which an earlier run may have left."""
    return [_size(log_path(logs, rank)) for rank in range(ranks)]


def remarks(logs: Path, before: list[int]) -> list[str]:
    """Return warnings and errors that ranks other than 0 have logged since `before`, and rank 0 hasn't."""
    printed = set(_lines(log_path(logs, 0), before[0]))
    lines: list[str] = []
    for rank, start in enumerate(before[1:], 1):
        new = [line for line in _lines(log_path(logs, rank), start) if _REMARK.search(line) and line not in printed]
        printed.update(new)
        lines += [f"rank {rank}: {line}" for line in dict.fromkeys(new)]
    more = len(lines) - _REMARKS_SHOWN
    return lines[:_REMARKS_SHOWN] + ([f"... and {more} more, in {logs}"] if more > 0 else [])


def _line_stream(descriptor: int) -> TextIO:
    # Not a `with`: these are the process's streams until it ends.
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path, start: int) -> Iterator[str]:
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(start)
        for line in file:
            yield line.decode("utf-8", "backslashreplace").strip()
