"""Samples that can't be read: errors that name them, a limit of time, and a source that leaves them out.

read([4, 7, 9]) raises --> read([4]), read([7]), read([9])
                           [7] raises            fail: "sample 7 can't be read"    skip: [4, 9], and 7 is left out
                           none, read([4, 7, 9]) raises again     "samples 4, 7, 9 ... but not put into one batch"
                                                 works now        used, with a warning about the sample
nothing is left        --> a good sample without weight: all ranks have the same number of micro-batches
"""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lockstep.core import heartbeat
from lockstep.core.errors import Failure, OutOfMemory, RunFailed, UnusableSamples
from lockstep.core.formatting import listed
from lockstep.core.out_of_memory import note_location, out_of_memory_cause
from lockstep.core.protocols import Source
from lockstep.core.records import Batch, LeftOutSample
from lockstep.data import noise
from lockstep.data.order import Indices, digest

T = TypeVar("T")
CONFIGURED = "data.leave_out"
"""The reason of samples that the config leaves out."""
BAD_NUMBERS = "bad numbers: "
"""The beginning of the reason of samples that are left out because of the numbers of their update."""
_LOOKED_AT = 16
_MOST_NAMED = 8
_MOST_WARNINGS = 5  # of a process
_warned = itertools.count()
_TICKS = 4
_NOTE = "while reading sample "
_log = logging.getLogger("lockstep.data")


def note_sample(error: Exception, index: int) -> None:
    """Add a note to `error` on the sample that raised it, where several are read together."""
    error.add_note(f"{_NOTE}{index}")


def _noted_sample(error: Exception) -> int | None:
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next((int(note.removeprefix(_NOTE)) for note in notes), None)


def _describe(error: Exception) -> str:
    if isinstance(error, UnusableSamples):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    because = f", after {type(cause).__name__}: {cause}" if cause is not None and str(cause) != str(error) else ""
    return f"{type(error).__name__}: {error}{place}{because}"


def _named_of(error: Exception, indices: Indices) -> str:
    sample = _noted_sample(error)
    samples = [*map(str, indices)] if sample is None else [str(sample)]
    return f"sample{'s' * (len(samples) > 1)} {listed(samples, _MOST_NAMED)}"


# --- errors -------------------------------------------------------------------------------------------------------


def read_or_explain(read: Callable[[Indices], T], indices: Indices) -> T:
    """Return `read(indices)`; if it raises twice, raise an UnusableSamples with the sample."""
    try:
        return read(indices)
    except Failure:
        raise
    except Exception as error:
        return read_again(read, indices, error)


def read_again(read: Callable[[Indices], T], indices: Indices, error: Exception) -> T:
    """Read the samples again after `read(indices)` raised `error`, and return them.

    Raises:
        UnusableSamples: They can't be read or batched; it has the sample.
        Exception: The error itself, marked with the samples, if memory ran out.
    """
    _reraise_out_of_memory(error, indices)
    try:
        for alone in (indices[place : place + 1] for place in range(len(indices))):
            read(alone)
        alone = indices
        values = read(indices)
    except Failure:  # it has its own message, or stops the run
        raise
    except Exception as again:
        _reraise_out_of_memory(again, alone)
        if alone is not indices:
            raise UnusableSamples(f"sample {alone[0]} can't be read: {_describe(again)}", alone.tolist()) from error
        remedy = "; a custom collate function can pad them" if "equal size" in str(again) else ""
        odd = _odd_one(read, indices)
        named = f"samples {listed([*map(str, indices)], _MOST_NAMED)} can each be read, but not put into one batch"
        if len(odd):
            named = f"sample {odd[0]} can be read, but not put into one batch with others"
        samples = odd if len(odd) else indices
        raise UnusableSamples(f"{named}: {_describe(again)}{remedy}", samples.tolist()) from error
    _warn_of_passing_error(indices, error)
    return values


def _odd_one(read: Callable[[Indices], object], indices: Indices) -> Indices:
    """Return the sample [1] that doesn't go into a batch with any of the others, which go together; else none [0]."""
    first, others = indices[:1], indices[1:]
    odd = np.array([index for index in others if _error_of(read, np.append(first, index)) is not None], indices.dtype)
    if len(odd) == len(others) > 1 and _error_of(read, others) is None:
        odd = first
    return odd if len(odd) == 1 < len(others) else indices[:0]


def _error_of(read: Callable[[Indices], object], indices: Indices) -> Exception | None:
    try:
        read(indices)
    except Exception as error:
        _reraise_failure(error)
        return error
    return None


def _warn_of_passing_error(indices: Indices, error: Exception) -> None:
    if next(_warned) < _MOST_WARNINGS:
        outcome = f"failed once and succeeded when it was tried again: {_describe(error)}"
        _log.warning("reading %s %s", _named_of(error, indices), outcome)


def _reraise_out_of_memory(error: Exception, indices: Indices) -> None:
    if out_of_memory_cause(error):
        note_location(error, "data", f"while reading {_named_of(error, indices)}")
        raise error


# --- a limit of time ----------------------------------------------------------------------------------------------


class _Over(BaseException):
    """The limit is over. No `except Exception` of a dataset catches it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit the time that reading a sample may take in the block, or all samples of a source that reads them at once.

    SIGALRM comes four times a limit, since a stopped process gets one signal, however long it was stopped. The main
    thread of a rank or data worker, which reads, gets the exception. Code that never returns to the interpreter isn't
    interrupted: the launcher ends its rank.

    Raises:
        TimeoutError: It takes longer.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    beat = heartbeat.own()
    slots, at = beat.sample_slot()
    sample, ticks, place = slots[at], 0, None

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal sample, ticks, place
        if place is not None or frame is None:
            return
        sample, ticks = slots[at], ticks + 1 if slots[at] == sample else 1
        if ticks >= _TICKS:
            place = TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
            beat.numbers[heartbeat.TIME] = time.perf_counter()  # the rank continues: the watch over it needn't end it
            raise _Over

    before = signal.signal(signal.SIGALRM, tick)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds / _TICKS, seconds / _TICKS)
        yield
    except _Over:
        raise TimeoutError(f"no end after {seconds:g} s (data.bad_samples.timeout)").with_traceback(place) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- leaving samples out ------------------------------------------------------------------------------------------


class SkippingSource:
    """A source without the samples that can't be read or are to be left out; `left_out` of a batch lists them.

    Args:
        skips: Whether other samples than `known` (index: reason) may be left out.
        timeout: Seconds; reading a sample for longer counts as endless.
    """

    def __init__(
        self,
        source: Source,
        *,
        skips: bool = True,
        known: Mapping[int, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.source = source
        self.facts = source.facts
        self.fingerprint = source.fingerprint
        self.draws = source.draws
        self._known = dict(known or {})
        self._skips = skips
        self._timeout = timeout if skips else None
        self._good: Indices | None = None

    def leave_out(self, samples: Mapping[int, str]) -> None:
        """Leave samples out without reading them again: reasons by index."""
        self._known.update(samples)
        if self._good is not None and int(self._good[0]) in samples:
            self._good = None

    def reasons(self, indices: Indices) -> dict[int, str]:
        """Return the reason, by index, for each of these samples that is known to be left out."""
        return {index: self._known[index] for index in indices.tolist() if index in self._known} if self._known else {}

    def lacks(self, indices: Indices, left_out: Sequence[LeftOutSample]) -> bool:
        """Return whether a batch lacks all of these samples that are to be left out; a worker may not know."""
        return not self._known or self.reasons(indices).keys() <= {sample.index for sample in left_out}

    def fetch(self, indices: Indices) -> Batch:
        left_out = self.reasons(indices) if self._known else {}
        usable = indices[[index not in left_out for index in indices.tolist()]] if left_out else indices
        if not len(usable):
            rows = np.repeat(self._good_sample(), min(len(indices), 2))  # batch norm can't be computed of one
            return replace(self._read(rows), samples=0, tokens=0, left_out=_listed(indices, left_out))
        try:
            batch = self._read(usable)
        except Exception as error:
            faults = self._faults(usable, error) if self._skips else {}
            if not faults:
                raise
            self._known |= faults  # a data worker has no other way to know them
            if self.draws:  # the samples that remain are drawn as if the others had never been there
                noise.seed_again()
            return self.fetch(indices)
        return replace(batch, left_out=_listed(indices, left_out)) if left_out else batch

    def _read(self, indices: Indices) -> Batch:
        with time_limit(self._timeout):
            return self.source.fetch(indices)

    def _faults(self, indices: Indices, error: Exception) -> dict[int, str]:
        _reraise_failure(error)
        errors = {index: _error_of(self._read, indices[indices == index]) for index in indices.tolist()}
        faults = {index: _describe(fault) for index, fault in errors.items() if fault is not None}
        if faults and out_of_memory_cause(error) and _error_of(self._read, self._good_sample()) is not None:
            return {}  # it isn't one sample that is too large
        sample = _noted_sample(error)
        if faults and sample is not None and sample not in faults:
            _warn_of_passing_error(indices, error)
        return faults

    def _good_sample(self) -> Indices:
        """Return a readable sample [1] of finite numbers: NaN without weight would still be NaN.

        Raises RunFailed if there is none among those that are tried, from the first to the last.
        """
        if self._good is not None:
            return self._good
        candidates = np.unique(np.linspace(0, self.facts.samples - 1, _LOOKED_AT).astype(np.int64))
        tried = candidates[[int(index) not in self._known for index in candidates]]
        reason = "" if tried.size else f": all are left out; sample 0: {self._known[0]}"
        with noise.keyed_generators(0):
            for index in tried:
                try:
                    batch = self._read(np.array([index]))
                except Exception as error:
                    _reraise_failure(error)
                    reason = reason or f": sample {index}: {_describe(error)}"
                    continue
                if all(map(_is_finite, tree_leaves(batch.inputs))):
                    self._good = np.array([index])
                    return self._good
        raise RunFailed(f"none of the {candidates.size} samples that were tried can be read{reason}")


def _is_finite(value: object) -> bool:
    return not (isinstance(value, torch.Tensor) and value.is_floating_point()) or bool(value.isfinite().all())


def _reraise_failure(error: Exception) -> None:
    if isinstance(error, Failure) and (not isinstance(error, RunFailed) or isinstance(error, OutOfMemory)):
        raise error


def _listed(indices: Indices, left_out: Mapping[int, str]) -> tuple[LeftOutSample, ...]:
    return tuple(LeftOutSample(index, left_out[index]) for index in indices.tolist() if index in left_out)


def positioned(left_out: tuple[LeftOutSample, ...], indices: Indices, first: int) -> tuple[LeftOutSample, ...]:
    """Return the samples with their positions; `first` is the position of the micro-batch's first of `indices`."""
    places = {index: first + place for place, index in enumerate(indices.tolist())}
    return tuple(replace(sample, position=places[sample.index]) for sample in left_out)


def sum_of_digests(epoch: int, left_out: tuple[LeftOutSample, ...]) -> int:
    """Return the digest of the samples; an update's digest is smaller by it, modulo `order.MODULUS`."""
    return digest(epoch, np.array([sample.index for sample in left_out], dtype=np.int64))
