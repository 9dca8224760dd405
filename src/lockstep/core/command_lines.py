"""Command lines that are printed for copying into a shell.

command_line("lockstep", "train", Path("my runs/a"))  -->  lockstep train 'my runs/a'
"""

from __future__ import annotations

import os
import shlex


def command_line(*words: str | os.PathLike[str]) -> str:
    """Return the words as a line for a shell, each quoted if need be; a path is never taken for a flag."""
    return shlex.join(_unlike_a_flag(word) if isinstance(word, os.PathLike) else word for word in words)


def _unlike_a_flag(path: os.PathLike[str]) -> str:
    text = os.fspath(path)
    return f"./{text}" if text.startswith("-") else text
