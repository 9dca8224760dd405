"""Derives a 64-bit key for every use of randomness from the seed and its purpose, so no state needs saving.

key(seed, "order", epoch)                     the order of an epoch
key(seed, "parameter", name)                  a parameter's initial values
key(seed, "dropout", update, rank, micro)     dropout of one forward
"""

from __future__ import annotations

import hashlib


def key(seed: int, *parts: int | str) -> int:
    """Return a 64-bit key, the same on every machine and Python: BLAKE2b of the seed and the parts with their types."""
    text = f"i{seed}"
    for part in parts:
        text += f"\x1fi{part}" if isinstance(part, int) else f"\x1fs{part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
