"""Failures that name the sample that can't be read, or what else kept samples from being read.

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
from lockstep.core.out_of_memory import mark, ran_out
from lockstep.data.order import Indices

T = TypeVar("T")


def read_or_explain(read: Callable[[Indices], T], indices: Indices) -> T:
    """Return what `read(indices)` returns; raise RunFailed, which names the sample, if it raises."""
    try:
        return read(indices)
    except Failure:
        raise
    except Exception as error:
        raise explained(read, indices, error) from error


def explained(read: Callable[[Indices], object], indices: Indices, error: Exception) -> RunFailed:
    """Return the failure to raise in place of `error`, which `read(indices)` raised; read the samples again to find it.

    Raises:
        Exception: the error itself, marked with the samples: memory ran out.
    """
    _pass_on_memory(error, indices)
    for index in indices:
        sample_error = _error_of(read, indices[indices == index])
        if sample_error is not None:
            return RunFailed(f"sample {index} can't be read: {describe(sample_error)}")
    batch_error = _error_of(read, indices)
    if batch_error is not None:
        remedy = "; a custom collate function can pad them" if "equal size" in str(batch_error) else ""
        why = f"{describe(batch_error)}{remedy}"
        return RunFailed(f"samples {named(indices)} can each be read, but not put into one batch: {why}")
    return RunFailed(
        f"reading samples {named(indices)} failed once, and succeeded when it was tried again: {describe(error)}. If "
        "what they are read from fails now and then (a network file system, a service), catch the error in the data "
        "set and retry there"
    )


def describe(error: Exception) -> str:
    """Return the error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def named(indices: Indices) -> str:
    """Return the indices as text, eight of them at most."""
    shown = ", ".join(str(index) for index in indices[:8])
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 8 else shown


def _error_of(read: Callable[[Indices], object], indices: Indices) -> Exception | None:
    try:
        read(indices)
    except Failure:  # it has its own message, or the run is to stop
        raise
    except Exception as error:
        _pass_on_memory(error, indices)
        return error
    return None


def _pass_on_memory(error: Exception, indices: Indices) -> None:
    if ran_out(error):
        mark(error, "data", f"while samples {named(indices)} were read")
        raise error
