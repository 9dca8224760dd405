r"""Escapes control characters in printed text: names, keys and generated texts must not control the terminal.

    ESC ] 0 ; evil BEL   -->  \x1b]0;evil\x07        also C1, characters that reverse text, and lone surrogates

Everything that Lockstep prints goes through `echo`, the console, or a Failure, which call `plain`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

_CONTROL = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LONGEST = 60


def plain(text: str) -> str:
    """Return the text with control characters escaped; lines and tabs remain."""
    return _CONTROL.sub(_shown, text)


def plain_line(text: str) -> str:
    """Return the same on one line."""
    return plain(text).replace("\r\n", "\\n").replace("\n", "\\n").replace("\t", "\\t")


def shortened(value: object) -> str:
    """Return a value as Python writes it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def echo(*texts: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print like `print`, with control characters escaped."""
    print(*(plain(str(text)) for text in texts), file=file or sys.stdout, end=end, flush=flush)


def echo_marked(parts: Iterable[tuple[str, bool]]) -> None:
    """Print texts as one line; marked ones are green on a terminal, otherwise in double brackets."""
    begin, end = ("\x1b[1;32m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("[[", "]]")
    print("".join(f"{begin}{plain(text)}{end}" if marked else plain(text) for text, marked in parts), flush=True)


def command_line(*words: str | os.PathLike[str]) -> str:
    """Return the words as a line for a shell; a path is never taken for a flag."""
    texts = [(os.fspath(word), isinstance(word, os.PathLike)) for word in words]
    return shlex.join(f"./{text}" if is_path and text.startswith("-") else text for text, is_path in texts)


@contextmanager
def muted_stderr() -> Iterator[None]:
    """Discard what the block writes to stderr, also from C++."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
