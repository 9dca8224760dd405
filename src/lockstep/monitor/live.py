"""Two rows at the bottom of a terminal that follow the run; everything else scrolls above them.

120/300 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 40 %  0:14 left
loss 2.345  24.5k tokens/s  12.3 steps/s  MFU 41.0 %  grad norm 0.82  lr 9.8e-04
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
    from rich.console import Group, RenderableType

_SHARE_OF_TIME = 0.003
_SECONDS_BETWEEN_DRAWINGS = 0.1
_LONGEST_PAUSE_S = 5.0  # after a terminal that didn't take a drawing at once
_UNKNOWN_WIDTH = 80
_NARROWEST = 20


@dataclass(frozen=True, slots=True)
class Status:
    """The contents of the rows: steps to do (None: unknown), remaining time, and other parts, the important first."""

    step: int
    steps: int | None
    left: str
    parts: tuple[str, ...]

    def fitting(self, width: int) -> str:
        """Return the parts that fit in a row."""
        text = ""
        for part in self.parts:
            longer = f"{text}  {part}" if text else part
            text = longer if len(longer) <= width else text
        return text


def progress_row(step: int, steps: int | None, left: str) -> RenderableType:
    """Return a row with a bar: steps done and to do, percent, time left; without a bar if `steps` is unknown."""
    from rich.progress_bar import ProgressBar
    from rich.table import Column, Table
    from rich.text import Text

    if not steps:
        return Text(f"step {step:,}  {left}".rstrip(), no_wrap=True)
    columns = [Column(no_wrap=name != "bar") for name in ("steps", "bar", "percent", "left")]
    row = Table.grid(*columns, padding=(0, 1, 0, 0), pad_edge=False)
    bar = ProgressBar(steps, step, complete_style="green", finished_style="green")
    row.add_row(Text(f"{step:,}/{steps:,}", "bold"), bar, f"{100 * step // steps} %", Text(f" {left}"))
    return row


def terminal_width(stream: TextIO) -> int:
    """Return the number of columns; 80 where it isn't known."""
    try:
        return max(_NARROWEST, os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH)
    except (OSError, ValueError):
        return _UNKNOWN_WIDTH


class LiveDisplay:
    """Two rows on a terminal, drawn with rich.

    They are drawn on the terminal itself. What is printed meanwhile, also by user code, goes to the original streams,
    above the rows: a stream that also writes a log (`launch.streams`) gets the text and none of the drawings.
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
        self._live = Live(
            console=self._terminal, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._started = False
        self._streams = sys.stdout, sys.stderr
        self.seconds_between_drawings = _SECONDS_BETWEEN_DRAWINGS
        self._status: Status | None = None
        self._above: list[AboveRows] = []
        self._lock = threading.RLock()  # user code prints in threads, too

    def start(self) -> None:
        self._live.start()
        self._started = True  # rich can't stop what failed on the way here
        self._terminal.show_cursor(True)  # a process that is killed can't bring it back
        self._streams = sys.stdout, sys.stderr
        self._above = [AboveRows(self, stream) for stream in self._streams]
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
            sys.stdout, sys.stderr = self._streams
            self._live.stop()
            for above in self._above:
                above.finish()

    def _draw(self, status: Status) -> Group:
        from rich.console import Group
        from rich.text import Text

        self._terminal.width = terminal_width(self._stream) - 1  # rich would ask standard input; the last one may wrap
        parts = plain_line(status.fitting(self._terminal.width))
        encoding = self._terminal.encoding
        return Group(
            progress_row(status.step, status.steps, status.left),
            Text(parts.encode(encoding, "replace").decode(encoding), no_wrap=True, overflow="crop"),
        )


class AboveRows:
    """A standard stream while there are rows below what is printed."""

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

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # isatty, fileno, encoding, buffer, ...
