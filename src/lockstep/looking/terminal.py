"""The live view in a terminal: the alternate screen, redrawn every second and when the size changes; q ends it."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from contextlib import suppress

from lockstep.core.stopping import undo_on_stop
from lockstep.looking.screen import ScreenLine

_REDRAWN_S = 1.0
_LOOKS_S = 0.1  # for keys and a new size
_STYLES = {"": "", "bold": "\x1b[1m", "dim": "\x1b[2m", "alarm": "\x1b[31m", "good": "\x1b[32m"}
_BEGIN = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, no wrapping
_END = "\x1b[?7h\x1b[?25h\x1b[?1049l"


def show(draw: Callable[[int, int], Sequence[ScreenLine]]) -> None:
    """Show what `draw(width, height)` returns until q is pressed, or input ends."""
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()
    before = termios.tcgetattr(keys)

    def restore() -> None:
        with suppress(OSError, termios.error):  # the terminal is closed
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
            os.write(screen, _END.encode())

    sys.stdout.flush()
    with undo_on_stop(restore):
        try:
            tty.setcbreak(keys)
            _write(screen, _BEGIN)
            _loop(keys, screen, draw)
        finally:
            restore()


def _loop(keys: int, screen: int, draw: Callable[[int, int], Sequence[ScreenLine]]) -> None:
    size, drawn = (0, 0), 0.0
    while True:
        columns, lines = os.get_terminal_size(screen)
        if (columns, lines) != size or time.monotonic() - drawn >= _REDRAWN_S:
            clear = "\x1b[2J" if (columns, lines) != size else ""
            _write(screen, clear + painted(draw(columns, lines), columns, lines))
            size, drawn = (columns, lines), time.monotonic()
        if select.select([keys], [], [], _LOOKS_S)[0]:
            pressed = os.read(keys, 100)
            if not pressed or pressed[:1] in b"qQ\x03\x04":
                return


def painted(lines: Sequence[ScreenLine], columns: int, height: int) -> str:
    """Return what draws these lines on a screen, with the key that ends it in the last row."""
    texts = [f"{_STYLES[line.style]}{line.text}\x1b[0m" for line in lines[: height - 1]]
    texts += [""] * (height - 1 - len(texts)) + ["\x1b[2m" + "q quits"[:columns] + "\x1b[0m"]
    return "".join(f"\x1b[{row};1H\x1b[K{text}" for row, text in enumerate(texts, 1))


def _write(screen: int, text: str) -> None:
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(screen, data) :]
