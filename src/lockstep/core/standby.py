"""Lets a rank that was started ahead wait until it is needed.

launcher        ranks of round 1 train ------------------------- one is killed --> open the gate
ranks of        forked a moment later --> join each other --> wait at the gate --> resume
round 2                                                       little memory, no time of a processor
"""

from __future__ import annotations

import os

_gate: list[int] = []


def wait_at(gate: int) -> None:
    """Let `wait` wait until the launcher opens this gate, an eventfd that counts how many ranks may pass."""
    _gate.append(gate)


def is_waiting() -> bool:
    """Return whether this process is a rank that isn't needed yet."""
    return bool(_gate)


def wait() -> None:
    """Wait until this rank is needed; one that wasn't started ahead is needed now."""
    if _gate:
        os.read(_gate[0], 8)  # repeated after a signal, unlike os.eventfd_read
        os.close(_gate.pop())
