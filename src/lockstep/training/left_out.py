"""The samples that a run leaves out, because they can't be read or collated: the same list on all ranks.

update      8                  9                              10
rank 0      fetches 9's batch  fetches 10's, lacks sample 17
rank 1      fetches 9's batch  fetches 10's
vote                           LEFT_OUT --> all ranks exchange which --> more than the limit? --> the run ends

A sample is listed once, with the first update that lacks it. All later epochs lack it, too, whatever reading it does by
then, so checkpoints don't grow with the epochs.
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
from lockstep.training.ledger import left_out_in

if TYPE_CHECKING:
    from lockstep.core.records import GlobalBatch, StepReport
    from lockstep.data.bad_samples import SkippingSource
    from lockstep.training.components import Components, FailureState

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
        self._unseen: list[LeftOutSample] = []

    def fetched(self, batch: GlobalBatch) -> tuple[Request, ...]:
        """Return this rank's request for the next vote, after it has fetched a batch."""
        new = [sample for sample in batch.left_out if sample.index not in self._listed]
        self._pending += new
        return (Request.LEFT_OUT,) if new else ()

    def receive(self, report: StepReport, failure_state: FailureState) -> None:
        """Exchange what ranks leave out, if one has requested it; all ranks together.

        Raises:
            RunFailed: There are more than `data.bad_samples.limit`, or ranks with the same samples disagree.
        """
        if Request.LEFT_OUT in report.requests:
            self._exchange(failure_state)

    def begin(self, batch: GlobalBatch, failure_state: FailureState) -> None:
        """Exchange what ranks leave out of the first batch, for which there was no vote; all ranks together.

        Raises:
            RunFailed: As `receive`, also if the run has left out more before it was started again.
        """
        if self._source is not None:
            self.fetched(batch)
            self._exchange(failure_state)

    def _exchange(self, failure_state: FailureState) -> None:
        own, self._pending = self._pending, []
        share = (self._position.share, self._position.reports_counts, own)
        shares = cast("list[_Share]", self._axis.gather(share))
        knew, failure_state.fails_together = failure_state.fails_together, True  # if it fails here
        _refuse_different(shares)
        before = {sample.index for sample in _bad(self._samples)}
        new = self._first_of_each(sample for _, counts, part in shares if counts for sample in part)
        self._samples += new
        self._unseen += new
        self._leave_out(new)
        for sample in _bad(new):
            if sample.index not in before:
                before.add(sample.index)
                number = len(before)
                left_out = f"left out, {number} of at most {self._limit}"
                one_more = f"it is bad sample {number}, and {_LIMIT} is {self._limit}"
                print_once(f"lockstep: {_line(sample)}; {left_out if number <= self._limit else one_more}")
        if len(before) > self._limit:
            raise RunFailed(_over_limit(_bad(self._samples), self._limit))
        failure_state.fails_together = knew

    @property
    def source(self) -> SkippingSource:
        """The source that leaves samples out."""
        assert self._source is not None, "sources of runs that ask for it leave samples out"
        return self._source

    def take_new(self) -> list[LeftOutSample]:
        """Return the samples that were exchanged since the last call."""
        new, self._unseen = self._unseen, []
        return new

    def state(self) -> list[dict[str, Any]]:
        """Return the samples as plain JSON, also those of updates that are not finished."""
        return [asdict(sample) for sample in self._samples]

    def restore(self, state: Iterable[Mapping[str, Any]], consumed: int) -> None:
        """Continue the list of a checkpoint after `consumed` samples; those that follow are found again."""
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


def _over_limit(samples: Sequence[LeftOutSample], limit: int) -> str:
    by_index = {sample.index: sample for sample in samples}
    lines = [f"  {_line(sample)}" for sample in list(by_index.values())[:_MOST_LISTED]]
    more = [f"  and {len(by_index) - _MOST_LISTED} more"] if len(by_index) > _MOST_LISTED else []
    head = (
        f"{counted(len(by_index), 'sample')} of data.train can't be used, and {_LIMIT} is {limit}. Mend the data, "
        "or set a higher limit, and start the run again to resume:"
    )
    return "\n".join([head, *lines, *more])


def _refuse_different(shares: Sequence[_Share]) -> None:
    """Raise RunFailed if ranks that have the same samples leave out different ones."""
    known: dict[int, tuple[int, list[int]]] = {}
    for rank, (share, _, part) in enumerate(shares):
        indices = [sample.index for sample in part]
        first, others = known.setdefault(share, (rank, indices))
        if indices != others:
            raise RunFailed(
                f"ranks {first} and {rank} have the same samples, and one of them could not read all: {others} and "
                f"{indices} can't be used. Their storage is unreliable: start the run again to resume"
            )


def with_remedy(error: Exception) -> Exception:
    """Return the error; of samples that can't be used, one that names the key of the config that leaves them out."""
    if not isinstance(error, UnusableSamples):
        return error
    remedy = "data.bad_samples.policy: skip leaves such samples out; mended data may need --accept-changes"
    failure = UnusableSamples(f"{error}; {remedy}", error.samples)
    failure.__cause__ = error.__cause__
    return failure
