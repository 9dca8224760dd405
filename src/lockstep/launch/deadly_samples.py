"""The record of samples whose reading ends the process that reads them: by a signal, an exit, a hang out of Python.

    reading sample 17 ends rank 1            recorded; the ranks start again, and read it once more
    reading sample 17 ends it again          policy skip: it is left out from then on; fail: the run ends
    reading one of samples 4, 17, 9 does     skip: the next round reads each of them alone, which shows the one

Those of an evaluation set, whose metrics would be another set's without them, are never left out.

RUN/logs/deadly_samples.jsonl has a line for each such end, with a digest of the data's section. It outlives ranks and
launches.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.config.writing import to_plain
from lockstep.core.files import append_line, forget
from lockstep.core.heartbeat import Reading
from lockstep.data.bad_samples import DEADLY, Deadly
from lockstep.launch.deaths import FILE, Death, deaths_in
from lockstep.launch.ends import End, EndKind, first_cause
from lockstep.launch.ends_file import gist

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_ENOUGH = 2  # ends of a sample's reader: one may be the host's
_MOST = 2**16  # samples of a line; a request that has more is known by these


class Consequence(NamedTuple):
    """The consequence of the end of a rank that was reading samples.

    Attributes:
        again: Whether another round may help as far as samples are concerned.
        left_out: What is left out from now on, as a sentence; empty: nothing.
        advice: What to do if the run ends.
    """

    again: bool
    left_out: str
    advice: str


@dataclass(frozen=True, slots=True)
class DeadlySamples:
    """The record of a run.

    Attributes:
        logs: The folder of the run's logs.
        data: A digest of the section of the training data.
        skips: Whether such samples are left out.
        evaluation: Digests of the sections of the evaluation sets, by name.
    """

    logs: Path
    data: str
    skips: bool
    evaluation: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, logs: Path) -> DeadlySamples:
        """Return the record of a run with this config."""
        sections = to_plain(config)["data"]
        evaluation = {name: _digest(section) for name, section in sections["evaluation"].items()}
        return cls(logs, _digest(sections["train"]), config.data.bad_samples.skips, evaluation)

    def known(self) -> Deadly:
        """Return the training samples to leave out, and those to read alone, as far as the record can be read."""
        deaths = self._deaths()
        reasons = {
            sample: f"{DEADLY}{times} times, the last time: {last}"
            for sample in sorted({sample for death in deaths if len(death.samples) == 1 for sample in death.samples})
            if (times := _times(deaths, [sample])) >= _ENOUGH
            for last in [next(death.what for death in reversed(deaths) if sample in death.samples)]
        }
        suspects = {sample for death in deaths if len(death.samples) > 1 for sample in death.samples}
        return Deadly(reasons, frozenset(suspects.difference(reasons)))

    def forget(self) -> None:
        """Forget all of it, for a run that starts over."""
        forget(self.logs / FILE)

    def add(self, samples: Sequence[int], what: str, evaluation_set: str | None = None) -> None:
        """Record the end of a process that was reading one of these samples."""
        line = {
            "data": self._digest_of(evaluation_set),
            "samples": [*samples[:_MOST]],
            "what": re.split("; |\\. ", gist(what))[0],
            **({} if evaluation_set is None else {"evaluation_set": evaluation_set}),
        }
        with suppress(OSError):  # the run starts again as after any other failure
            append_line(self.logs / FILE, json.dumps(line))

    def after(self, ends: Sequence[End], first: int = 0) -> Consequence | None:
        """Record which samples ended the ranks of a round that failed first; return what follows.

        Others may have been reading, too, without harm. None: the first was reading none.

        Args:
            first: The number of the first of these ranks.
        """
        before, cause = self.known().reasons, first_cause(ends)
        if cause is None:
            return None
        deaths = {
            (end.samples, end.evaluation_set): _what(rank, end)
            for rank, end in enumerate(ends, first)
            if end.samples and (rank - first == cause or end.time <= ends[cause].time)
        }
        for (samples, evaluation_set), what in deaths.items():
            self.add(samples, what, evaluation_set)
        if not ends[cause].samples:
            return None
        evaluation_set = ends[cause].evaluation_set
        if evaluation_set is not None:
            return self._verdict_on_evaluated(Reading(ends[cause].samples, evaluation_set))
        return self._verdict(ends[cause].samples, before)

    def _verdict_on_evaluated(self, reading: Reading) -> Consequence:
        times = _times(self._deaths(reading.evaluation_set), reading.samples)
        advice = (
            f"reading {reading} has ended the process {_often(times)}: mend it, or leave it out of the set "
            "(data.bad_samples and data.leave_out are for training samples alone), then start the run again to resume"
        )
        return Consequence(times < _ENOUGH, "", advice)

    def _verdict(self, samples: Sequence[int], before: Mapping[int, str]) -> Consequence:
        times, name = _times(self._deaths(), samples), str(Reading((*samples,)))
        new = [sample for sample in self.known().reasons if sample not in before] if self.skips else []
        if new:
            left_out = f"sample{'s' * (len(new) > 1)} {', '.join(map(str, new))}"
            verb = "are" if len(new) > 1 else "is"
            advice = f"start the run again to resume: {left_out} {verb} left out then"
            return Consequence(True, f"{left_out} {verb} left out from here on (data.bad_samples)", advice)
        follows = f"reading {name} has ended the process {_often(times)}"
        if self.skips and times < _ENOUGH:
            return Consequence(
                True, "", f"{follows}; start the run again to resume: a sample that does so again is left out"
            )
        keys = f"data.leave_out='[[{samples[0]}, {samples[0]}]]'" if len(samples) == 1 else "data.leave_out"
        skip = "" if self.skips else ", or data.bad_samples='{policy: skip}'"
        again = "then start the run again to resume (mended data may need --accept-changes)"
        advice = f"{follows}: mend it, or leave it out by {keys}{skip}, {again}"
        return Consequence(times < _ENOUGH, "", advice)

    def _deaths(self, evaluation_set: str | None = None) -> list[Death]:
        data = self._digest_of(evaluation_set)
        return [death for death in deaths_in(self.logs) if (death.data, death.evaluation_set) == (data, evaluation_set)]

    def _digest_of(self, evaluation_set: str | None) -> str:
        return self.data if evaluation_set is None else self.evaluation.get(evaluation_set, "")


def _digest(section: object) -> str:
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:16]


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _times(deaths: Iterable[Death], samples: Sequence[int]) -> int:
    """Return how many of the ends were of processes that were reading all of these samples, and maybe others."""
    recorded = {*samples[:_MOST]}
    return sum(recorded <= death.samples for death in deaths)


def _what(rank: int, end: End) -> str:
    return end.text if end.kind in (EndKind.HUNG, EndKind.MESSAGE) else f"rank {rank} {end.text}"
