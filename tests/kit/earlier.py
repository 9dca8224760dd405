"""A checkpoint's manifest in the form of version 1, as earlier versions wrote it: it lists every part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.checkpoint import hashing
from lockstep.checkpoint.hashing import HASH_CHARACTERS

MANIFEST = "manifest.json"


def rewrite_as_version_1(folder: Path) -> None:
    """Replace the manifest of a checkpoint by the one that version 1 would have written."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    del manifest["grids"]
    for entry in manifest["tensors"].values():
        del entry["grid"]
        entry["parts"] = []
    for file in sorted(manifest["files"]):
        for key, part in parts_in(folder / file).items():
            name, _, offsets = key.partition("@")
            part["offsets"] = [int(offset) for offset in offsets.split(",")] if offsets else [0] * len(part["sizes"])
            manifest["tensors"][name]["parts"].append(part)
    manifest["format_version"] = 1
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (folder / MANIFEST).write_text(f'{{"manifest":{text},"xxh3_128":"{hashing.hash_bytes(text.encode())}"}}\n')


def parts_in(file: Path) -> dict[str, dict[str, Any]]:
    """Return the parts that a file's header lists, by key."""
    data = file.read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:first])
    hashes = header.pop("__metadata__")["xxh3_128"]
    parts = {}
    for key, entry in header.items():
        start, end = entry["data_offsets"]
        number = -(-(end - start) // hashing.BLOCK_BYTES) * HASH_CHARACTERS
        blocks, hashes = hashes[:number], hashes[number:]
        parts[key] = {
            "file": file.name,
            "at": first + start,
            "sizes": entry["shape"],
            "blocks": [blocks[index : index + HASH_CHARACTERS] for index in range(0, number, HASH_CHARACTERS)],
        }
    return parts
