"""The source of the running Python's standard library as text: 12 MB of real data on every machine, no network.

sorted files --> every 20th is held out --> the split's files, joined --> windows of bytes
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

from lockstep.config.schema import StdlibText
from lockstep.core.errors import ConfigError
from lockstep.data.windows import WindowSource, cut_windows, fingerprint

_HELD_OUT_EVERY = 20
# What is installed beside it, what is not source, and tests, which many systems package apart
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def open_stdlib_text(section: StdlibText, *, aligned: bool) -> WindowSource:
    """Return windows of bytes.

    Args:
        aligned: as of `WindowSource`.

    Raises:
        ConfigError: more samples are asked for than there are, or this Python comes without its source.
    """
    held_out = section.split == "held-out"
    files = [
        path
        for number, (_, path) in enumerate(stdlib_files())
        if (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == held_out
    ]
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
    windows = cut_windows(text, section.length, f"the standard library's {section.split} text")
    available = len(windows)
    if section.samples is not None and section.samples > available:
        raise ConfigError(
            f"samples {section.samples} is more than the {available} that there are; {available} or null takes all"
        )
    windows = windows[: section.samples]
    known_by = fingerprint("stdlib-text", section.length, len(windows), text)
    return WindowSource(windows, known_by, aligned=aligned, vocabulary=256, bytes_per_token=1.0)


def stdlib_files() -> list[tuple[str, Path]]:
    """Return each source file's name relative to the library, with slashes, and its path, sorted by name.

    Raises:
        ConfigError: this Python comes without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += ((path.relative_to(root).as_posix(), path) for path in paths)
    if not files:
        raise ConfigError(f"this Python has no standard library source in {root}; use one installed with its files")
    return sorted(files)
