"""Two rows at the bottom of a terminal that follow the run; everything else scrolls above them.

    120/300 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 40 %  0:14 left
    loss 2.345  24.5k tokens/s  12.3 steps/s  MFU 41.0 %  grad norm 0.82  lr 9.8e-04

They are drawn by the thread that prints, when a report comes, and so seldom that drawing takes at most 0.3 % of the
time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, cast

from lockstep.core.terminal import plain_line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_SHARE_OF_TIME = 0.003
_SECONDS_BETWEEN_DRAWINGS = 0.1
_LONGEST_PAUSE_S = 5.0  # after a terminal that didn't take a drawing at once
_UNKNOWN_WIDTH = 80
_NARROWEST = 20


@dataclass(frozen=True, slots=True)
class Status:
    """The contents of the rows.

    Attributes:
        step: done; `steps` to do, None if that isn't known.
        left: the remaining time, such as `0:14 left`; empty if it isn't known.
        parts: everything else, the important first; those that don't fit are left out.
    """

    step: int
    steps: int | None
    left: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows as drawn, each at most as wide as the terminal."""

    head: str
    bar_done: str
    bar_left: str
    tail: str
    parts: str


def rows(status: Status, width: int, signs: str = "━━") -> Rows:
    """Fit a status into `width` columns. `signs` are the bar's: done, left."""
    width -= 1  # a terminal may wrap after its last column
    left = f"  {status.left}" if status.left else ""
    if status.steps is None:
        head, tail, bar = f"step {status.step:,}", left, 0
    else:
        head, tail = f"{status.step:,}/{status.steps:,} ", f" {100 * status.step // status.steps} %{left}"
        bar = max(0, width - len(head) - len(tail))
    done = round(bar * status.step / status.steps) if status.steps else 0
    text = ""
    for part in status.parts:
        longer = f"{text}  {part}" if text else part
        text = longer if len(longer) <= width else text
    return Rows(head, signs[0] * done, signs[1] * (bar - done), tail, text)


def terminal_width(stream: TextIO) -> int:
    """Return the number of columns; 80 where it isn't known."""
    try:
        return max(_NARROWEST, os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH)
    except (OSError, ValueError):
        return _UNKNOWN_WIDTH


class LiveDisplay:
    """Two rows on a terminal, drawn with rich.

    The rows are drawn on the terminal itself. Text printed meanwhile, by user code too, goes to the original streams,
    above the rows: where a stream also writes a log, the log has the text and none of the drawings.

    Attributes:
        seconds_between_drawings: how long the next drawing should wait.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        class Terminal(Console):
            def on_broken_pipe(self) -> None:
                """Raise; rich would end the process."""
                raise BrokenPipeError("the terminal is gone")

        self._stream = stream
        try:
            is_standard_output = sys.__stdout__ is not None and stream.fileno() == sys.__stdout__.fileno()
        except (OSError, ValueError):
            is_standard_output = False
        terminal = sys.__stdout__ if is_standard_output else stream
        self._terminal = Terminal(file=terminal, force_terminal=True, highlight=False)
        self._signs = "━━" if "utf" in self._terminal.encoding else "=-"
        self._live: Live = Live(
            console=self._terminal,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._started = False
        self.seconds_between_drawings = _SECONDS_BETWEEN_DRAWINGS
        self._status: Status | None = None
        self._above: list[AboveRows] = []
        self._lock = threading.RLock()  # user code prints in threads, too

    def start(self) -> None:
        self._live.start()
        self._started = True  # rich can't stop what failed on the way here
        self._terminal.show_cursor(True)  # a process that is killed can't bring it back
        self._above = [AboveRows(self, sys.stdout), AboveRows(self, sys.stderr)]
        sys.stdout, sys.stderr = (cast("TextIO", stream) for stream in self._above)

    def show(self, status: Status) -> None:
        began = time.perf_counter()
        with self._lock:
            self._status = status
            self._live.update(self._draw(status), refresh=True)
        drawing = time.perf_counter() - began
        self.seconds_between_drawings = min(max(_SECONDS_BETWEEN_DRAWINGS, drawing / _SHARE_OF_TIME), _LONGEST_PAUSE_S)

    def print(self, text: str) -> None:
        """Print a line above the rows."""
        self.write_above(self._stream, text + "\n")

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write complete lines to `stream`, above the rows."""
        with self._lock:
            if self._status is not None:
                self._live.update("", refresh=True)
            stream.write(text)
            stream.flush()
            if self._status is not None:
                self._live.update(self._draw(self._status), refresh=True)

    def stop(self) -> None:
        if not self._started:
            return
        with self._lock:
            self._status = None
            for above in self._above:
                above.restore()
            self._live.stop()
            for above in self._above:
                above.finish()

    def _draw(self, status: Status) -> Text:
        from rich.text import Text

        width = terminal_width(self._stream)
        self._terminal.width = width  # rich would ask standard input
        drawn = rows(status, width, self._signs)
        return Text.assemble(
            (plain_line(drawn.head), "bold"),
            (drawn.bar_done, "green"),
            (drawn.bar_left, "bright_black"),
            plain_line(drawn.tail),
            "\n",
            plain_line(drawn.parts).encode(self._terminal.encoding, "replace").decode(self._terminal.encoding),
            no_wrap=True,
            overflow="crop",
        )


class AboveRows:
    """A standard stream while there are rows below what is printed.

    Args:
        stream: the original one.
    """

    def __init__(self, display: LiveDisplay, stream: TextIO) -> None:
        self._display = display
        self._stream = stream
        self._incomplete = ""

    def write(self, text: str) -> int:
        """Print the complete lines; the next rows would be drawn over the rest."""
        *lines, self._incomplete = (self._incomplete + text).split("\n")
        if lines:
            self._display.write_above(self._stream, "\n".join(lines) + "\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Print the incomplete line."""
        self._stream.write(self._incomplete)
        self._incomplete = ""

    def restore(self) -> None:
        """Put the original stream in its place again."""
        if sys.stdout is cast("object", self):
            sys.stdout = self._stream
        if sys.stderr is cast("object", self):
            sys.stderr = self._stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # isatty, fileno, encoding, buffer, ...
