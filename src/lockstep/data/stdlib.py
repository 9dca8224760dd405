"""Data from the source of Python's standard library, which is on every machine: 12 MB of text, no network.

    text        sorted files --> every 20th is held out --> the split's files, joined --> windows of bytes
    functions   the 9 packages with most functions --> their functions, by ast --> bytes; the package is the class

A function's text doesn't reveal its class: in all functions the names of these packages are replaced by `_`, and equal
texts are kept once. The hash of a function's qualified name decides whether it is held out, independent of other files.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from lockstep.config.schema import StdlibFunctions, StdlibText
from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts
from lockstep.data.order import Indices, fingerprint
from lockstep.data.windows import WindowSource, cut_windows

_HELD_OUT_FILE = 20
# installed packages, files that aren't source, and tests, which many systems package separately
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def open_stdlib_text(section: StdlibText, *, aligned: bool) -> WindowSource:
    """Return windows of bytes; `aligned` as for `WindowSource`. Raises ConfigError."""
    text = np.frombuffer(text_of(held_out=section.split == "held-out"), dtype=np.uint8)
    windows = cut_windows(text, section.length, f"the standard library's {section.split} text")
    available = len(windows)
    if section.samples is not None and section.samples > available:
        raise ConfigError(f"samples {section.samples} is more than the {available} that exist; null takes all")
    windows = windows[: section.samples]
    content = fingerprint("stdlib-text", section.length, len(windows), text)
    return WindowSource(windows, content, aligned=aligned, vocabulary=256, bytes_per_token=1.0)


@lru_cache(maxsize=2)
def text_of(*, held_out: bool) -> bytes:
    """Read the files of a split, joined; in one process once. Raises ConfigError as `stdlib_files`."""
    return b"".join(
        _content(path)
        for number, (_, path) in enumerate(stdlib_files())
        if (number % _HELD_OUT_FILE == _HELD_OUT_FILE - 1) == held_out
    )


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def stdlib_files() -> list[tuple[str, str]]:
    """Return each source file's name relative to the library, with slashes, and its path, sorted by name."""
    root = sysconfig.get_paths()["stdlib"]
    files: list[tuple[str, str]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        paths = (os.path.join(folder, name) for name in names if name.endswith(".py"))
        files += ((path[len(root) + 1 :].replace(os.sep, "/"), path) for path in paths)
    if not files:
        raise ConfigError(f"this Python has no standard library source in {root}; use one installed with its files")
    return sorted(files)


_CLASSES = 9
_HELD_OUT_FUNCTION = 10
_SHORTEST = 40  # bytes; shorter functions don't differ between packages
_DEFINITION = re.compile(rb"^[ \t]*(?:async )?def ", re.MULTILINE)


class _Function(NamedTuple):
    package: str
    name: str
    text: bytes


class StdlibFunctionsSource:
    """Functions as bytes, padded to the longest of the batch, with a mask; the targets are classes: `packages`.

    `aligned` gives inputs the names of the transformers library's models.
    """

    draws = False

    def __init__(self, section: StdlibFunctions, *, aligned: bool = False) -> None:
        self._aligned = aligned
        functions = _all_functions()
        self.packages = tuple(sorted({function.package for function in functions}))
        chosen = [function for function in functions if _is_held_out(function.name) == (section.split == "held-out")]
        self._classes = torch.tensor([self.packages.index(function.package) for function in chosen])
        texts = [function.text[: section.length] for function in chosen]
        self._lengths = np.array([len(text) for text in texts])
        samples = len(texts)
        self._bytes = np.zeros((samples, int(self._lengths.max())), dtype=np.uint8)  # padded with zeros
        self._bytes[np.arange(self._bytes.shape[1]) < self._lengths[:, None]] = np.frombuffer(b"".join(texts), np.uint8)
        self.facts = DataFacts(samples, None, vocabulary=256, classes=len(self.packages), bytes_per_token=1.0)
        self.fingerprint = fingerprint("stdlib-functions", self.packages, self._bytes, self._classes.numpy())

    def fetch(self, indices: Indices) -> Batch:
        lengths = self._lengths[indices]
        longest = lengths.max()
        tokens = torch.from_numpy(self._bytes[indices, :longest].astype(np.int64))
        mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
        targets = self._classes[torch.from_numpy(indices)]
        inputs = (
            {"input_ids": tokens, "attention_mask": mask.long()} if self._aligned else {"tokens": tokens, "mask": mask}
        )
        return Batch(inputs, targets, len(indices), int(lengths.sum()))


@lru_cache(maxsize=1)
def _all_functions() -> tuple[_Function, ...]:
    files: dict[str, list[tuple[str, str]]] = {}
    counts: Counter[str] = Counter()
    for name, path in stdlib_files():
        package, slash, _ = name.partition("/")
        if slash and package.isidentifier():
            files.setdefault(package, []).append((name, path))
            counts[package] += len(_DEFINITION.findall(_content(path)))
    most = sorted(counts, key=lambda package: (-counts[package], package))[:_CLASSES]
    package_names = re.compile("|".join(re.escape(name) for name in most), re.IGNORECASE)
    functions: dict[bytes, _Function] = {}
    for package in sorted(most):
        for name, path in files[package]:
            for function, text in _functions_of(path):
                blanked = package_names.sub("_", text).encode()
                if len(blanked) >= _SHORTEST:
                    functions.setdefault(blanked, _Function(package, f"{name}:{function}", blanked))
    return tuple(functions.values())


def _functions_of(path: str) -> Iterator[tuple[str, str]]:
    source = _content(path).decode(errors="replace").replace("\r\n", "\n")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates and deliberately broken files
        return
    yield from _definitions(tree, "", source.split("\n"))


def _definitions(node: ast.Module | ast.ClassDef, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.", lines)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            text = "\n".join(lines[child.lineno - 1 : child.end_lineno])
            yield prefix + child.name, textwrap.dedent(text)


def _is_held_out(name: str) -> bool:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELD_OUT_FUNCTION == 0
