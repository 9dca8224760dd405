"""The hashes that every byte of a checkpoint is read against.

    tensor bytes --cut--> blocks of 16 MiB --> xxh3_128( run | step | file | tensor | place in it | bytes )

A hash is bound to where its bytes belong, so a block of another step, another run, or another tensor is as wrong as a
flipped bit. XXH3 (Collet 2019) runs at memory speed and finds any accidental change but 1 in 2^128; against somebody
who forges hashes too it is no protection.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

BLOCK = 16 * 2**20  # bytes


class Binding:
    """Where blocks belong.

    Args:
        run: the run's identity.
        step: of the checkpoint.
        file: within it.
    """

    def __init__(self, run: str, step: int, file: str) -> None:
        self._place = f"{run}/{step}/{file}/"

    def block(self, name: str, place: int, data: memoryview) -> str:
        """Of the bytes of `name` from byte `place` on."""
        bound = xxhash.xxh3_128(f"{self._place}{name}/{place}/{len(data)}/".encode())
        bound.update(data)
        return bound.hexdigest()

    def blocks(self, name: str, data: memoryview) -> list[str]:
        """Of all blocks of `name`, in order."""
        return [self.block(name, start, data[start:stop]) for start, stop in cut(len(data))]


def of_bytes(data: bytes | memoryview) -> str:
    """Of a whole small file."""
    return xxhash.xxh3_128_hexdigest(data)


def cut(size: int) -> Iterator[tuple[int, int]]:
    """Where the blocks of so many bytes start and stop."""
    for start in range(0, size, BLOCK):
        yield start, min(start + BLOCK, size)
