"""Errors that name the sample that can't be read, or another reason why samples can't be read.

read([4, 7, 9]) raises --> read([4]), read([7]), read([9])
                           one raises            "sample 7 can't be read"
                           none, read([4, 7, 9]) raises again
                               read([4, 7]), read([4, 9])         "sample 9 can't be put into one batch with sample 4"
                               no single one is to blame          "... but not put into one batch"
                                                 works now        used, with a warning that names the sample
                       --> memory ran out: nothing is read again
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from lockstep.core.errors import Failure, UnusableSamples
from lockstep.core.out_of_memory import note_location, out_of_memory_cause
from lockstep.data.order import Indices

T = TypeVar("T")
_MOST_WARNINGS = 5  # of a process
_log = logging.getLogger("lockstep.data")
_warned = 0


class UnfitItem(TypeError):
    """A dataset returned what can't be put into a batch.

    Attributes:
        place: Of the item among those that were to be put into the batch.
    """

    def __init__(self, message: str, place: int = 0) -> None:
        super().__init__(message)
        self.place = place


class _SampleNote(str):
    """A note on an exception that states which sample raised it."""

    sample: int


def read_or_explain(read: Callable[[Indices], T], indices: Indices) -> T:
    """Return `read(indices)`; if it raises, and again, raise an UnusableSamples that names the sample."""
    try:
        return read(indices)
    except Failure:
        raise
    except Exception as error:
        return read_again(read, indices, error)


def read_again(read: Callable[[Indices], T], indices: Indices, error: Exception) -> T:
    """Read the samples again, for which `read(indices)` raised `error`, and return them.

    Raises:
        UnusableSamples: They can't be read, or not be put into one batch; it names the sample.
        Exception: The error itself, marked with the samples, if memory ran out.
    """
    reraise_out_of_memory(error, indices)
    for index in indices:
        sample_error = _error_of(read, indices[indices == index])
        if sample_error is not None:
            verb = "used" if isinstance(sample_error, UnfitItem) else "read"
            raise UnusableSamples(f"sample {index} can't be {verb}: {describe(sample_error)}") from error
    try:
        values = read(indices)
    except Failure:
        raise
    except Exception as batch_error:
        reraise_out_of_memory(batch_error, indices)
        raise UnusableSamples(_unlike_each_other(read, indices, batch_error)) from error
    warn_of_passing_error(indices, error)
    return values


def _unlike_each_other(read: Callable[[Indices], object], indices: Indices, error: Exception) -> str:
    """Return which sample doesn't go into a batch with the others, or that they don't."""
    remedy = "; a custom collate function can pad them" if "equal size" in str(error) else ""
    reason = f"{describe(error)}{remedy}"
    first, others = indices[:1], indices[1:]
    unlike = [index for index in others if _error_of(read, np.append(first, index)) is not None]
    if len(unlike) == 1 and len(others) > 1:
        return f"sample {unlike[0]} can't be put into one batch with sample {first[0]}: {reason}"
    if len(unlike) == len(others) > 1 and _error_of(read, others) is None:
        return f"sample {first[0]} can't be put into one batch with sample {others[0]}: {reason}"
    return f"samples {named(indices)} can each be read, but not put into one batch: {reason}"


def note_sample(error: Exception, index: int) -> None:
    """Add a note to `error` on the sample that raised it, where several are read together."""
    note = _SampleNote(f"while sample {index} was read")
    note.sample = index
    error.add_note(note)


def noted_sample(error: Exception) -> int | None:
    """Return the sample that raised the error; None if it isn't known."""
    return next((note.sample for note in getattr(error, "__notes__", ()) if isinstance(note, _SampleNote)), None)


def warn_of_passing_error(indices: Indices, error: Exception) -> None:
    """Report an error that didn't come again, with its sample, or all samples [n] of the read if that isn't known."""
    global _warned
    _warned += 1
    if _warned > _MOST_WARNINGS:
        return
    sample = noted_sample(error)
    alone = indices if sample is None else indices[indices == sample]
    samples = f"samples {named(indices)}" if len(alone) > 1 else f"sample {named(alone)}"
    more = "; further ones aren't reported" if _warned == _MOST_WARNINGS else ""
    verb = "using" if isinstance(error, UnfitItem) else "reading"
    outcome = f"failed once and succeeded when it was tried again: {describe(error)}"
    _log.warning("%s %s %s%s", verb, samples, outcome, more)


def describe(error: Exception) -> str:
    """Return the error and the line that raised it; of an item, the dataset's, only what is wrong with it."""
    if isinstance(error, UnfitItem):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    because = f", after {type(cause).__name__}: {cause}" if cause is not None and str(cause) != str(error) else ""
    return f"{type(error).__name__}: {error}{place}{because}"


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
        sample = noted_sample(error)
        alone = indices if sample is None else np.array([sample])
        samples = f"samples {named(alone)} were" if len(alone) > 1 else f"sample {named(alone)} was"
        note_location(error, "data", f"while {samples} read")
        raise error
