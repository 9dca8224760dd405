"""The hashes that every byte of a checkpoint is verified against.

    tensor bytes --> blocks of 16 MiB --> xxh3_128( run | step | file | tensor | offset | length | bytes )

A hash includes where its bytes belong, so a block of another step, run or tensor is detected like a flipped bit. XXH3
runs at memory speed; it does not protect from deliberate forgery.
"""

from __future__ import annotations

import xxhash

BLOCK_BYTES = 16 * 2**20
HASH_CHARACTERS = 32


class BlockHasher:
    """Hashes the blocks of one file of a checkpoint."""

    def __init__(self, run: str, step: int, file: str) -> None:
        self._prefix = f"{run}/{step}/{file}/"

    def hash_block(self, name: str, offset: int, *pieces: memoryview) -> str:
        """Return the hash of the bytes of tensor `name` that begin at byte `offset`, piece by piece."""
        state = xxhash.xxh3_128(f"{self._prefix}{name}/{offset}/{sum(map(len, pieces))}/".encode())
        for piece in pieces:
            state.update(piece)
        return state.hexdigest()


def hash_bytes(data: bytes | memoryview) -> str:
    """Return the hash of a small file's content."""
    return xxhash.xxh3_128_hexdigest(data)
