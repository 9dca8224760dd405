"""Errors that name the sample that can't be read, or another reason why samples can't be read.

read([4, 7, 9]) raises --> read([4]), read([7]), read([9])
                           one raises            "sample 7 can't be read"
                           none, read([4, 7, 9]) raises again     "... but not put into one batch"
                                                 works now        "reading samples 4, 7, 9 failed once"
                       --> memory ran out: nothing is read again
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from lockstep.core.errors import Failure, RunFailed
from lockstep.core.out_of_memory import note_location, out_of_memory_cause
from lockstep.data.order import Indices

T = TypeVar("T")


def read_or_explain(read: Callable[[Indices], T], indices: Indices) -> T:
    """Return `read(indices)`; if it raises, raise a RunFailed that names the sample."""
    try:
        return read(indices)
    except Failure:
        raise
    except Exception as error:
        raise explained(read, indices, error) from error


def explained(read: Callable[[Indices], object], indices: Indices, error: Exception) -> RunFailed:
    """Read the samples again to find the one for which `read(indices)` raised `error`; return the failure to raise.

    Raises:
        Exception: The error itself, marked with the samples, if memory ran out.
    """
    reraise_out_of_memory(error, indices)
    for index in indices:
        sample_error = _error_of(read, indices[indices == index])
        if sample_error is not None:
            return RunFailed(f"sample {index} can't be read: {describe(sample_error)}")
    batch_error = _error_of(read, indices)
    if batch_error is not None:
        remedy = "; a custom collate function can pad them" if "equal size" in str(batch_error) else ""
        reason = f"{describe(batch_error)}{remedy}"
        return RunFailed(f"samples {named(indices)} can each be read, but not put into one batch: {reason}")
    return RunFailed(
        f"reading samples {named(indices)} failed once and succeeded when it was tried again: {describe(error)}. If "
        "their storage is unreliable (a network file system, a service), catch the error in the dataset and retry there"
    )


def describe(error: Exception) -> str:
    """Return the error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def named(indices: Indices) -> str:
    """Return the first eight indices as text."""
    shown = ", ".join(str(index) for index in indices[:8])
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 8 else shown


def _error_of(read: Callable[[Indices], object], indices: Indices) -> Exception | None:
    try:
        read(indices)
    except Failure:  # it has its own message, or stops the run
        raise
    except Exception as error:
        reraise_out_of_memory(error, indices)
        return error
    return None


def reraise_out_of_memory(error: Exception, indices: Indices) -> None:
    """Raise the error, marked with the samples that were read, if memory ran out."""
    if out_of_memory_cause(error):
        note_location(error, "data", f"while samples {named(indices)} were read")
        raise error
