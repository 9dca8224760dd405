"""Which package of the standard library does a function come from?

    packages with most functions (9) --> their functions, by ast --> bytes, the packages' names blanked out --> class

The text doesn't give the answer away: every package's name becomes `_`, in all functions alike; a text that occurs
twice is kept once. A function is held out by the hash of its qualified name, so that other files never move it.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.schema import StdlibFunctions
from lockstep.core.records import Batch, DataFacts
from lockstep.data.order import Indices
from lockstep.data.stdlib_text import stdlib_files
from lockstep.data.windows import fingerprint

_CLASSES = 9
_HELD_OUT_SHARE = 10  # one in so many
_SHORTEST = 40  # bytes; below, there is nothing to tell packages apart by
_DEFINITION = re.compile(rb"^[ \t]*(?:async )?def ", re.MULTILINE)


class _Function(NamedTuple):
    package: str
    name: str
    text: bytes


class StdlibFunctionsSource:
    """Functions as bytes, padded to the longest of the batch, with a mask; the targets are classes.

    Attributes:
        packages: the classes' names, by number.
    """

    draws = False

    def __init__(self, section: StdlibFunctions, *, aligned: bool = False) -> None:
        """`aligned`: inputs have the names of the transformers library's models."""
        self._aligned = aligned
        functions = _all_functions()
        self.packages = tuple(sorted({function.package for function in functions}))
        chosen = [function for function in functions if _held_out(function.name) == (section.split == "held-out")]
        self._classes = torch.tensor([self.packages.index(function.package) for function in chosen])
        texts = [function.text[: section.length] for function in chosen]
        self._lengths = np.array([len(text) for text in texts])
        self._bytes = _padded(texts, self._lengths)
        samples = len(texts)
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
    """Of the packages that define most; a text that occurs again anywhere is left out."""
    files = _files_by_package()
    names = re.compile("|".join(re.escape(name) for name in files), re.IGNORECASE)
    found: dict[bytes, _Function] = {}
    for package in sorted(files):
        for name, path in files[package]:
            for function, text in _functions_of(path):
                blanked = names.sub("_", text).encode()
                if len(blanked) >= _SHORTEST:
                    found.setdefault(blanked, _Function(package, f"{name}:{function}", blanked))
    return tuple(found.values())


def _files_by_package() -> dict[str, list[tuple[str, Path]]]:
    """Names and paths of the files of the packages that define most functions."""
    files: dict[str, list[tuple[str, Path]]] = {}
    counts: Counter[str] = Counter()
    for name, path in stdlib_files():
        package, slash, _ = name.partition("/")
        if slash and package.isidentifier():
            files.setdefault(package, []).append((name, path))
            counts[package] += len(_DEFINITION.findall(path.read_bytes()))
    most = sorted(counts, key=lambda package: (-counts[package], package))[:_CLASSES]
    return {package: files[package] for package in most}


def _functions_of(path: Path) -> Iterator[tuple[str, str]]:
    """Qualified name and dedented text of the functions and methods of a file; not of those inside functions."""
    source = path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
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


def _held_out(name: str) -> bool:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELD_OUT_SHARE == 0


def _padded(texts: list[bytes], lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """[texts, longest], zeros behind the end."""
    padded = np.zeros((len(texts), int(lengths.max())), dtype=np.uint8)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(texts), dtype=np.uint8)
    return padded
