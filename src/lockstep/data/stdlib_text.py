"""The source of the running Python's standard library as text: 12 MB of real data on every machine, no network.

sorted files --> every 20th is held out --> the split's files, joined --> windows of bytes
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lockstep.config.schema import StdlibText
from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts
from lockstep.data.order import Indices
from lockstep.data.windows import cut_windows, fingerprint, next_token_batch

_HELD_OUT_EVERY = 20
# What is installed beside it, what is not source, and tests, which many systems package apart
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class StdlibTextSource:
    """Windows of bytes; the targets are the next bytes."""

    draws = False

    def __init__(self, section: StdlibText, *, aligned: bool = False) -> None:
        """`aligned`: as in `next_token_batch`."""
        self._aligned = aligned
        files = [path for number, (_, path) in enumerate(stdlib_files()) if _belongs(number, section.split)]
        text = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
        windows = cut_windows(text, section.length, f"the standard library's {section.split} text")
        self._windows = windows[: _checked(section.samples, len(windows))]
        self.facts = DataFacts(len(self._windows), section.length, vocabulary=256, bytes_per_token=1.0)
        self.fingerprint = fingerprint("stdlib-text", section.length, len(self._windows), text)

    def fetch(self, indices: Indices) -> Batch:
        return next_token_batch(self._windows, indices, aligned=self._aligned)


def stdlib_files() -> list[tuple[str, Path]]:
    """Name relative to the library, with slashes, and path of each source file, sorted by name.

    Raises:
        ConfigError: this Python comes without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted((path.relative_to(root).as_posix(), path) for path in _walk(root))
    if not files:
        raise ConfigError(f"this Python has no standard library source in {root}; use one installed with its files")
    return files


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _belongs(number: int, split: str) -> bool:
    return (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == (split == "held-out")


def _checked(asked: int | None, there: int) -> int:
    if asked is not None and asked > there:
        raise ConfigError(f"samples {asked} is more than the {there} that there are; {there} or null takes all")
    return there if asked is None else asked
