"""Writes and checks the hashes of published files, in a list beside them that `xxhsum --check` also reads.

A file that is not listed is not checked. A list with a malformed line is damaged, and so is every file beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from lockstep.core.files import open_file, write_atomically

LIST = "XXH128SUMS"
_LINE = re.compile(r"([0-9a-f]{32})  ([^/]+)")
_CHUNK = 16 * 2**20  # bytes
_MAX_LIST_BYTES = 2**20  # Lockstep's own lists are shorter


def record(files: Iterable[Path]) -> None:
    """Hash files of one folder into its list. Raises OSError."""
    for file in files:
        _write(file.parent, {**_read(file.parent), file.name: hash_of(file)})


def record_folder(folder: Path, known: Mapping[str, str]) -> None:
    """Write the list of all files of a new folder, with the hashes that are `known`. Raises OSError."""
    names = [file.name for file in folder.iterdir() if file.is_file()]
    _write(folder, {name: known.get(name) or hash_of(folder / name) for name in names})


def forget(file: Path) -> None:
    """Remove a file from its list, before it is replaced. Raises OSError."""
    listed = _read(file.parent)
    if listed.pop(file.name, None) is not None:
        _write(file.parent, listed)


def fault(file: Path) -> str | None:
    """Read all of a file and return what is wrong with it, if anything. Raises OSError."""
    hashes = _read(file.parent)
    if LIST in hashes:
        return f"{file.with_name(LIST)} has a line that isn't a hash and the name of one more file"
    expected = hashes.get(file.name)
    if expected is None:
        return None
    if not file.exists():
        return f"it is missing, but {file.with_name(LIST)} lists it"
    return None if hash_of(file) == expected else f"its bytes don't match {file.with_name(LIST)}"


def listed(folder: Path) -> list[Path]:
    """Return the files that a folder's list names, and the list itself if it is damaged."""
    return [folder / name for name in sorted(_read(folder))]


def hash_of(file: Path) -> str:
    """Return the hash of a file's bytes. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with open_file(file) as opened:
        while size := opened.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, str]:
    """Return hashes by name; a list that is damaged names itself."""
    try:
        with open_file(folder / LIST) as file:
            lines = file.read(_MAX_LIST_BYTES).decode("utf-8", "replace").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    pairs = [match.groups() for line in lines[:-1] if (match := _LINE.fullmatch(line))]
    hashes = {name: value for value, name in pairs}
    intact = len(lines) > 1 and lines[-1] == "" and len(hashes) == len(lines) - 1
    return hashes if intact else {**hashes, LIST: ""}


def _write(folder: Path, hashes: Mapping[str, str]) -> None:
    lines = [f"{value}  {name}\n" for name, value in sorted(hashes.items()) if name != LIST]
    if lines:
        write_atomically(folder / LIST, "".join(lines))
    else:
        (folder / LIST).unlink()
