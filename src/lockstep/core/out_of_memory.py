"""Recognizes out-of-memory errors of torch, CUDA, numpy and Python, without importing any of them."""

from __future__ import annotations

import errno
import re
from typing import Literal

from lockstep.core.errors import Failure, causes

Phase = Literal["forward", "backward", "update", "data", "evaluation", "checkpoint"]

_MEANS_MEMORY = re.compile(
    r"out of memory|(can't|cannot|unable to) allocate|not enough memory|std::bad_alloc|_ALLOC_FAILED", re.IGNORECASE
)
_REQUESTED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}


class ErrorLocation(str):
    """A note on an exception that says where in a run it was raised."""

    phase: Phase

    def __new__(cls, phase: Phase, text: str) -> ErrorLocation:
        place = super().__new__(cls, text)
        place.phase = phase
        return place

    def __getnewargs__(self) -> tuple[Phase, str]:  # type: ignore[override]  # a str's own has one
        return self.phase, str(self)


def note_location(error: BaseException, phase: Phase, text: str) -> None:
    """Add a note to `error` on where it was raised, such as "in the forward pass of step 3"."""
    error.add_note(ErrorLocation(phase, text))


def error_location(error: BaseException) -> ErrorLocation | None:
    """Return the innermost location noted on the error or its causes; None if there is none.

    Samples read for an evaluation are a part of it.
    """
    notes = (note for link in reversed(list(causes(error))) for note in getattr(link, "__notes__", ()))
    places = [note for note in notes if isinstance(note, ErrorLocation)]
    if not places:
        return None
    evaluates = places[0].phase == "data" and any(place.phase == "evaluation" for place in places)
    return ErrorLocation("evaluation", str(places[0])) if evaluates else places[0]


def out_of_memory_cause(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error among the error and its causes, if any."""
    return next((link for link in causes(error) if _means_memory(link)), None)


def requested_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed allocation, if the error says so."""
    match = _REQUESTED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else None


def lacks_shared_memory(error: BaseException) -> bool:
    """Return whether /dev/shm, where data workers pass tensors, is full."""
    return "shared memory" in str(error)


def _means_memory(error: BaseException) -> bool:
    if isinstance(error, Failure):  # its message is Lockstep's
        return False
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and _MEANS_MEMORY.search(str(error)) is not None
