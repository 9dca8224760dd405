"""Writes and checks the hashes of published files, in a list beside them that `xxhsum --check` also reads.

    model/model.safetensors
    model/XXH128SUMS                f1d0...  model.safetensors

A file that is not listed is not checked: most files that are read come from other programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from lockstep.core.files import open_file, write_atomically

LIST = "XXH128SUMS"
_CHUNK = 16 * 2**20  # bytes
_MAX_LIST_BYTES = 2**20  # Lockstep's own lists are shorter


def record(files: Iterable[Path]) -> None:
    """Hash files of one folder into its list. Raises OSError."""
    for file in files:
        _write(file.parent, {**_read(file.parent), file.name: hash_of(file)})


def write_list(folder: Path, hashes: Mapping[str, str]) -> None:
    """Write the list of a new folder, given the hashes of its files by name. Raises OSError."""
    _write(folder, hashes)


def forget(file: Path) -> None:
    """Remove a file from its list, before it is replaced: the old hash would make it look damaged. Raises OSError."""
    listed = _read(file.parent)
    if listed.pop(file.name, None) is not None:
        _write(file.parent, listed)


def fault(file: Path) -> str | None:
    """Read all of a file and return what is wrong with it; None if nothing, or if no list names it. Raises OSError."""
    expected = _read(file.parent).get(file.name)
    if expected is None:
        return None
    if not file.exists():
        return f"it is gone, and {file.with_name(LIST)} names it"
    return None if hash_of(file) == expected else f"its bytes are not those that {file.with_name(LIST)} was made of"


def listed(folder: Path) -> list[Path]:
    """Return the files that a folder's list names, present or missing."""
    return [folder / name for name in sorted(_read(folder))]


def hash_of(file: Path) -> str:
    """Return the hash of a file's bytes. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with open_file(file) as opened:
        while size := opened.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, str]:
    """Return hashes by name; malformed lines are left out."""
    try:
        with open_file(folder / LIST) as file:
            lines = file.read(_MAX_LIST_BYTES).decode("utf-8", "replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    pairs = (line.split("  ", 1) for line in lines)
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and pair[1] and pair[1] == Path(pair[1]).name}


def _write(folder: Path, hashes: Mapping[str, str]) -> None:
    if hashes:
        write_atomically(folder / LIST, "".join(f"{value}  {name}\n" for name, value in sorted(hashes.items())))
    else:
        (folder / LIST).unlink()
