"""The samples that a run leaves out, because they can't be read or collated: the same list on all ranks.

    rank 0   fetches a batch, lacks sample 17 --> vote: LEFT_OUT --> all ranks exchange which --> over the limit?

A sample is listed once, with the first update that lacks it; all later epochs lack it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from lockstep.core.errors import RunFailed, UnusableSamples
from lockstep.core.formatting import counted
from lockstep.core.records import LeftOutSample, Request
from lockstep.data.bad_samples import BAD_NUMBERS, CONFIGURED
from lockstep.data.sources import skipping_part
from lockstep.distributed.user_collectives import print_once
from lockstep.loop.ledger import left_out_in

if TYPE_CHECKING:
    from lockstep.core.records import GlobalBatch
    from lockstep.data.bad_samples import SkippingSource
    from lockstep.loop.components import Components, FailureState

_LIMIT = "data.bad_samples.limit"
_MOST_LISTED = 20
_Share = tuple[int, bool, list[LeftOutSample]]


class LeftOutSamples:
    """The samples that a run has left out so far; free while there are none."""

    def __init__(self, components: Components) -> None:
        self._axis = components.world.axis
        self._limit = components.config.data.bad_samples.limit
        self._configured = components.config.data.leave_out
        self._source = skipping_part(components.source)
        self._position = components.position
        self._pending: list[LeftOutSample] = []
        self._samples: list[LeftOutSample] = []
        self._listed: set[int] = set()  # those of `_samples` that are left out now
        self.unseen: list[LeftOutSample] = []  # by `take_new`

    def fetched(self, batch: GlobalBatch) -> tuple[Request, ...]:
        """Return this rank's request for the next vote, after it has fetched a batch."""
        new = [sample for sample in batch.left_out if sample.index not in self._listed]
        self._pending += new
        return (Request.LEFT_OUT,) if new else ()

    def begin(self, batch: GlobalBatch, failure_state: FailureState) -> None:
        """Exchange what ranks leave out of the first batch, before any vote; all ranks together."""
        if self._source is not None:
            self.fetched(batch)
            self.exchange(failure_state)

    def exchange(self, failure_state: FailureState) -> None:
        """Exchange what ranks leave out, since one has requested it; all ranks together.

        Raises:
            RunFailed: There are more than `data.bad_samples.limit`, or ranks with the same samples disagree.
        """
        own, self._pending = self._pending, []
        share = (self._position.share, self._position.reports_counts, own)
        shares = cast("list[_Share]", self._axis.gather(share))
        knew, failure_state.fails_together = failure_state.fails_together, True  # if it fails here
        _refuse_different(shares)
        before = {sample.index for sample in _bad(self._samples)}
        new = self._first_of_each(sample for _, counts, part in shares if counts for sample in part)
        self._samples += new
        self.unseen += new
        self._leave_out(new)
        for sample in _bad(new):
            if sample.index not in before:
                before.add(sample.index)
                print_once(f"lockstep: {_line(sample)}; bad sample {len(before)}, and {_LIMIT} is {self._limit}")
        if len(before) > self._limit:
            lines = [_line(sample) for sample in {sample.index: sample for sample in _bad(self._samples)}.values()]
            shown = "".join(f"\n  {line}" for line in lines[:_MOST_LISTED])
            raise RunFailed(
                f"{counted(len(before), 'sample')} of data.train can't be used, and {_LIMIT} is {self._limit}. Mend "
                f"the data, or set a higher limit, and start the run again to resume:{shown}"
            )
        failure_state.fails_together = knew

    @property
    def source(self) -> SkippingSource:
        """The source that leaves samples out."""
        assert self._source is not None, "sources of runs that ask for it leave samples out"
        return self._source

    def take_new(self) -> list[LeftOutSample]:
        """Return the samples that were exchanged since the last call."""
        new, self.unseen = self.unseen, []
        return new

    def state(self) -> list[dict[str, Any]]:
        """Return the samples as plain JSON."""
        return [asdict(sample) for sample in self._samples]

    def restore(self, state: Iterable[Mapping[str, Any]], consumed: int) -> None:
        """Continue the list of a checkpoint after `consumed` samples; later ones are found again."""
        self._samples = [
            replace(sample, until=consumed) if sample.until is None and not self._stays(sample) else sample
            for sample in left_out_in(state)
            if sample.position < consumed
        ]
        self._pending = []
        self._listed = set()
        self._leave_out([sample for sample in self._samples if sample.until is None])

    def _stays(self, sample: LeftOutSample) -> bool:
        """Return whether a sample of an earlier attempt is left out of this one, too."""
        if sample.reason == CONFIGURED:
            return any(first <= sample.index <= last for first, last in map(sorted, self._configured))
        return self._source is not None

    def _first_of_each(self, samples: Iterable[LeftOutSample]) -> list[LeftOutSample]:
        """Return the samples that aren't listed yet, each once: two updates of a tiny epoch may have lacked it."""
        new: dict[int, LeftOutSample] = {}
        for sample in sorted(samples, key=attrgetter("position")):
            if sample.index not in self._listed:
                new.setdefault(sample.index, sample)
        return [*new.values()]

    def _leave_out(self, samples: Sequence[LeftOutSample]) -> None:
        self._listed.update(sample.index for sample in samples)
        if self._source is not None:
            self._source.leave_out({sample.index: sample.reason for sample in samples if sample.reason != CONFIGURED})


def _bad(samples: Iterable[LeftOutSample]) -> list[LeftOutSample]:
    return [sample for sample in samples if sample.reason != CONFIGURED and not sample.reason.startswith(BAD_NUMBERS)]


def _line(sample: LeftOutSample) -> str:
    return f"sample {sample.index} of data.train can't be used: {sample.reason}"


def _refuse_different(shares: Sequence[_Share]) -> None:
    """Raise RunFailed if ranks that have the same samples leave out different ones."""
    known: dict[int, tuple[int, list[int]]] = {}
    for rank, (share, _, part) in enumerate(shares):
        indices = [sample.index for sample in part]
        first, others = known.setdefault(share, (rank, indices))
        if indices != others:
            raise RunFailed(
                f"ranks {first} and {rank} have the same samples, and can't use {others} and {indices}: their storage "
                "is unreliable; start the run again to resume"
            )


def with_remedy(error: Exception) -> Exception:
    """Return the error; for bad samples, one with the config key that leaves them out."""
    if not isinstance(error, UnusableSamples):
        return error
    remedy = "data.bad_samples.policy: skip leaves such samples out; mended data may need --accept-changes"
    failure = UnusableSamples(f"{error}; {remedy}", error.samples)
    failure.__cause__ = error.__cause__
    return failure
