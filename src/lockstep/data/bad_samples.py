"""A source that leaves out samples that can't be read, or not be put into a batch with others, or shall be left out.

fetch [4, 7, 9] raises --> [4], [7], [9] are read one by one: [7] raises      --> [4, 9], and 7 is left out
                           none raises; with a sample that is fine, 9 raises  --> [4, 7], and 9 is left out
                           none raises, and [4, 7, 9] works now               --> [4, 7, 9], with a warning
nothing is left        --> a sample that is fine, without weight: all ranks have the same number of micro-batches

Whether a sample is left out doesn't depend on the others in its micro-batch, so it is the same on any number of ranks.
Items that torch's own function collates must therefore have the shapes that most items have, also if one is alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.core.errors import Failure, OutOfMemory, RunFailed
from lockstep.core.out_of_memory import out_of_memory_cause
from lockstep.core.records import Batch, LeftOutSample
from lockstep.data import noise
from lockstep.data.order import Indices, digest
from lockstep.data.time_limit import time_limit
from lockstep.data.unreadable import describe, named, noted_sample, reraise_out_of_memory, warn_of_passing_error

if TYPE_CHECKING:
    from lockstep.core.protocols import Source

CONFIGURED = "data.leave_out"
"""The reason of samples that the config leaves out."""
BAD_NUMBERS = "bad numbers: "
"""The beginning of the reason of samples that are left out because of the numbers of their update."""
WENT_BACK = "; the run went back"
"""The end of the reason of samples that `rollbacks.json` lists."""
_LOOKED_AT = 16
_MOST = 0.75  # of the samples that are looked at have the shapes that all must have


class _OtherShapes(Exception):
    """A sample can't be put into a batch with most others."""


class SkippingSource:
    """A source whose batches lack the samples that can't be used; their `left_out` lists them.

    Args:
        uniform: Whether the source puts only samples of equal shapes into one batch.
        skips: Whether other samples than `known` may be left out.
        known: Reasons of samples to leave out, by index.
        timeout: Seconds after which reading a sample counts as endless; None: never.
    """

    def __init__(
        self,
        source: Source,
        *,
        uniform: bool,
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
        self._uniform = uniform
        self._shapes: str | None = None
        self._reference: Indices | None = None
        if uniform:
            self._look()

    def leave_out(self, samples: Mapping[int, str]) -> None:
        """Leave samples out without reading them again.

        Args:
            samples: Reasons by index.
        """
        self._known.update(samples)
        if self._reference is not None and int(self._reference[0]) in samples:
            self._reference = None

    @property
    def number_left_out(self) -> int:
        """The number of samples that are known to be left out."""
        return len(self._known)

    def leaves_out(self, sample: int) -> bool:
        """Return whether a sample is known to be left out."""
        return sample in self._known

    def reasons(self, indices: Indices) -> dict[int, str]:
        """Return why those of these samples that are known to be left out are, by index."""
        return {index: self._known[index] for index in indices.tolist() if index in self._known} if self._known else {}

    def lacks(self, indices: Indices, left_out: Sequence[LeftOutSample]) -> bool:
        """Return whether a batch of these samples lacks all that are known to be left out; a worker may not know."""
        if not self._known:
            return True
        lacked = {sample.index for sample in left_out}
        return all(index in lacked for index in indices.tolist() if index in self._known)

    @contextmanager
    def without(self, samples: Mapping[int, str]) -> Iterator[None]:
        """Leave samples out while the block runs.

        Args:
            samples: Reasons by index.
        """
        known, reference = dict(self._known), self._reference
        self.leave_out(samples)
        try:
            yield
        finally:
            self._known, self._reference = known, reference

    def fetch(self, indices: Indices) -> Batch:
        left_out = self.reasons(indices)
        tried_again = False
        generators = noise.generator_states() if self.draws else None
        while True:
            usable = indices[[index not in left_out for index in indices.tolist()]] if left_out else indices
            if not len(usable):
                return self._substitute(indices, left_out)
            try:
                batch = self._read(usable)
            except Exception as error:
                if not self._skips:
                    raise
                faults = self._faults(usable, error)
                if not faults and tried_again:
                    raise
                tried_again = True
                left_out |= faults
                self._known |= faults  # a data worker has no other way to know them
                if generators is not None:  # the samples that remain are drawn as if the others had never been there
                    noise.restore_generators(generators)
                continue
            return replace(batch, left_out=_listed(indices, left_out)) if left_out else batch

    def _fetch(self, indices: Indices) -> Batch:
        with time_limit(self._timeout):
            return self.source.fetch(indices)

    def _read(self, indices: Indices) -> Batch:
        batch = self._fetch(indices)
        if self._shapes is not None and (shapes := _shapes_of(batch)) != self._shapes:
            assert self._reference is not None
            raise _OtherShapes(f"it has the shapes {shapes}, and sample {self._reference[0]} has {self._shapes}")
        return batch

    def _faults(self, indices: Indices, error: Exception) -> dict[int, str]:
        """Return why samples can't be used, by index; empty if all can, when they are read again."""
        _reraise_failure(error)
        errors = {int(index): _error_of(self._read, indices[indices == index]) for index in indices}
        faults = {index: _reason(fault) for index, fault in errors.items() if fault is not None}
        if out_of_memory_cause(error) and (not faults or _error_of(self._fetch, self._good_sample()) is not None):
            reraise_out_of_memory(error, indices)  # it isn't one sample that is too large
        if faults or _error_of(self._read, indices) is None:
            sample = noted_sample(error)
            if sample not in faults if sample is not None else not faults:
                warn_of_passing_error(indices, error)
            return faults
        reference = self._good_sample()
        for index in indices[indices != reference[0]]:
            fault = _error_of(self._read, np.append(reference, index))
            if fault is not None:
                faults[int(index)] = f"can't be put into one batch with sample {reference[0]}: {describe(fault)}"
        if not faults:
            reason = f"samples {named(indices)} can each be read, but not put into one batch: {describe(error)}"
            raise RunFailed(reason) from error
        return faults

    def _substitute(self, indices: Indices, left_out: Mapping[int, str]) -> Batch:
        rows = min(len(indices), 2)  # batch norm can't be computed of one
        batch = self._read(np.repeat(self._good_sample(), rows))
        return replace(batch, samples=0, tokens=0, left_out=_listed(indices, left_out))

    def _good_sample(self) -> Indices:
        """Return a sample [1] that can be read. Raises RunFailed if there is none among those that are looked at."""
        if self._reference is None:
            self._look()
        if self._reference is not None:
            return self._reference
        first = np.zeros(1, np.int64)
        error = _error_of(self._fetch, first)
        reason = f": sample 0: {describe(error)}" if error is not None else ""
        raise RunFailed(f"none of {self._candidates().size} samples can be read that were tried{reason}")

    def _look(self) -> None:
        """Read some samples, from the first to the last, to find one that is fine and the shapes that most have."""
        if not self.facts.samples:
            return
        shapes: dict[int, str] = {}
        not_finite = set()  # without weight such a sample would still make its update's gradient NaN
        with noise.keyed_generators(0):
            for index in self._candidates():
                if int(index) in self._known:
                    continue
                try:
                    batch = self._fetch(np.array([index]))
                    shapes[int(index)] = _shapes_of(batch)
                    if not _is_finite(batch.inputs):
                        not_finite.add(int(index))
                except Exception as error:
                    _reraise_failure(error)
        if not shapes:
            return
        common, number = Counter(shapes.values()).most_common(1)[0]
        alike = [index for index, shape in shapes.items() if shape == common]
        index = next((index for index in alike if index not in not_finite), alike[0])
        self._reference = np.array([index])
        if self._uniform and number >= _MOST * len(shapes):
            self._shapes = shapes[index]

    def _candidates(self) -> Indices:
        return np.unique(np.linspace(0, self.facts.samples - 1, _LOOKED_AT).astype(np.int64))


def _error_of(read: Callable[[Indices], Batch], indices: Indices) -> Exception | None:
    try:
        read(indices)
    except Exception as error:
        _reraise_failure(error)
        return error
    return None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _OtherShapes) else describe(error)


def _reraise_failure(error: Exception) -> None:
    """Raise what is not about a sample: the run is stopped, for example."""
    if isinstance(error, Failure) and (not isinstance(error, RunFailed) or isinstance(error, OutOfMemory)):
        raise error


def _listed(indices: Indices, left_out: Mapping[int, str]) -> tuple[LeftOutSample, ...]:
    return tuple(LeftOutSample(index, left_out[index]) for index in indices.tolist() if index in left_out)


def positioned(left_out: tuple[LeftOutSample, ...], indices: Indices, first: int) -> tuple[LeftOutSample, ...]:
    """Return the samples with their positions.

    Args:
        indices: All samples of their micro-batch.
        first: Position of the first of them.
    """
    places = {index: first + place for place, index in enumerate(indices.tolist())}
    return tuple(replace(sample, position=places[sample.index]) for sample in left_out)


def sum_of_digests(epoch: int, left_out: tuple[LeftOutSample, ...]) -> int:
    """Return the digest of the samples; an update's digest is smaller by it, modulo `order.MODULUS`."""
    return digest(epoch, np.array([sample.index for sample in left_out], dtype=np.int64))


def _shapes_of(batch: Batch) -> str:
    """Return the shapes of a batch's values, by name or in order, without the dim of samples."""
    shown = [_shapes(batch.inputs), *([_shapes(batch.targets)] if batch.targets is not None else [])]
    return ", ".join(shown)


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in tensors of a value, however nested, are finite."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))


def _shapes(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(list(value.shape[1:]))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shapes(part)}" for name, part in value.items())
    if isinstance(value, tuple) or (isinstance(value, list) and value and not isinstance(value[0], str | bytes)):
        return ", ".join(map(_shapes, value))
    return type(value).__name__
