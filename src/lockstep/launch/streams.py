"""The output of ranks: terminal and logs.

    rank 0    sys.stdout, sys.stderr --> the terminal (isatty still holds) and logs/rank-0.log
    others    file descriptors 1, 2  --> logs/rank-N.log

Output of C++ code in rank 0, and what is drawn on `sys.__stdout__` (a progress display), is on the terminal only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import TextIO, cast

from lockstep.core.files import append_to
from lockstep.core.secrets import masked, secrets_in

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)")
_LONGEST_LINE = 65_536  # characters that wait for the end of their line


def log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


class _LogStream:
    """A text stream to a log, without colors, cursor movements and secrets.

    Each thread's output is written line by line, so that secrets are found that are printed in parts. Output that can't
    be written is lost: `report` is called once with the reason.
    """

    def __init__(self, descriptor: int, report: Callable[[OSError], None], *, closes: bool = False) -> None:
        self._log: TextIO = open(  # noqa: SIM115  a standard stream stays open until the process ends
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=closes
        )
        self._secrets = secrets_in(os.environ)
        self._report = report
        self._has_lost_output = False
        self._begun: dict[int, str] = {}  # lines that have no end yet, by thread

    def write(self, text: str) -> int:
        whole = self._begun.pop(get_ident(), "") + text
        end = max(whole.rfind("\n"), whole.rfind("\r")) + 1
        if len(whole) - end > _LONGEST_LINE:
            end = len(whole)
        if end < len(whole):
            self._begun[get_ident()] = whole[end:]
        if end > 0:
            self._write(whole[:end])
        return len(text)

    def write_rest(self) -> None:
        """Write lines that have no end: this process ends."""
        for thread in list(self._begun):
            self._write(self._begun.pop(thread, ""))

    def _write(self, text: str) -> None:
        self._attempt(lambda: self._log.write(masked(_ESCAPES.sub("", text), self._secrets)))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(self._log.flush)

    def close(self) -> None:
        self.write_rest()
        self._attempt(self._log.close)

    def fileno(self) -> int:
        return self._log.fileno()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if not self._has_lost_output:
                self._has_lost_output = True
                self._report(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


class _DoubledStream:
    """A text stream that also writes its output to a log, afterwards."""

    def __init__(self, stream: TextIO, log: _LogStream) -> None:
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

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # flush, isatty, fileno, encoding, buffer, ...: the terminal's


@contextmanager
def doubled(path: Path | None) -> Iterator[None]:
    """Write rank 0's output to its terminal and append it to `path`; to the terminal only if `path` is None."""
    before = sys.stdout, sys.stderr

    def report(error: OSError) -> None:
        with suppress(OSError, ValueError):
            before[1].write(_cannot_write(path, error))
            before[1].flush()

    try:
        log = None if path is None else _LogStream(append_to(path), report, closes=True)
    except OSError as error:
        report(error)
        log = None
    if path is None or log is None:
        yield
        return
    sys.stdout, sys.stderr = (cast(TextIO, _DoubledStream(stream, log)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        log.close()


def redirect(path: Path) -> None:
    """Append all that this process prints from now on to `path`, including output of C++ code.

    If the log can't be written, output is lost, and that is reported once on the terminal.
    """
    terminal = os.dup(2)

    def report(error: OSError) -> None:
        with suppress(OSError):
            os.write(terminal, _cannot_write(path, error).encode())

    try:
        file = append_to(path)
    except OSError as error:
        report(error)
        file = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    # the old streams may be buffered, or not on 1 and 2 at all
    sys.stdout, sys.stderr = (cast(TextIO, _LogStream(descriptor, report)) for descriptor in (1, 2))


def flush() -> None:
    """Write all that was printed, before this process ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, without a reader, or print() was interrupted
            if isinstance(stream, _LogStream):
                stream.write_rest()
            stream.flush()


def _cannot_write(path: Path | None, error: OSError) -> str:
    return f"lockstep: {path} can't be written: {error.strerror or error}; the run continues without this log\n"


def sizes(logs: Path, ranks: Sequence[int]) -> dict[int, int]:
    """Return the bytes of each rank's log, which an earlier run may have written."""
    paths = {rank: log_path(logs, rank) for rank in ranks}
    return {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
