"""Starts the ranks again after failures that another round may not meet.

    round 1   ranks --> rank 1 was killed, at step 120      transient  --> again, from the newest state
    round 2   ranks --> rank 0 was killed, at step 340      transient  --> again: the run has got further
    round 3   ranks --> KeyError at step 400                program    --> once more: it may have been the host
    round 4   ranks --> KeyError at step 400                program    --> ends: it is the program, or its data

After memory has run out, the next round has smaller micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from lockstep.core.failure_kinds import FailureKind, Retry
from lockstep.core.formatting import counted
from lockstep.core.heartbeat import Reading
from lockstep.launch.ends import End, first_cause
from lockstep.launch.outcome import LaunchResult, gist, print_on_stderr
from lockstep.launch.rank_stacks import raising_line

if TYPE_CHECKING:
    from lockstep.config.training_sections import Recovery

BY_KERNEL = (FailureKind.HOST_MEMORY, FailureKind.WORKER_MEMORY)
"""A kill for memory, which another process may have taken: without smaller micro-batches the ranks start again, too."""
_OF_HOST = "look at the host (`lockstep doctor RUN` reads what is left), then start the run again to resume"
_ADVICE = {
    Retry.PROGRAM: "the same failure would come again: mend the program or its data, then start the run again",
    Retry.TRANSIENT: _OF_HOST,
    Retry.HANG: _OF_HOST,
    Retry.HOST: "look at the host and its network, then start the run again on all hosts to resume",
}
"""The remedy for a run that has failed too often."""


class Rounds(Protocol):
    """The further rounds of a launch: a `Supervisor`'s, or several hosts' (`agent`)."""

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Callable[[], int] | None: ...
    def concluded(self, result: LaunchResult) -> LaunchResult: ...


@dataclass
class Supervisor:
    """Decides after each round whether there is another one.

    Attributes:
        last_step: Returns the last update that the run has recorded or saved.
        resumed: Returns the entry of a rank that resumes from what the rounds before have saved.
        smaller: Makes micro-batches smaller after memory has run out; returns what changes, empty if nothing can.
        taken: Returns why no ranks may start in the run's folder any more; empty: they may.
        rounds: Number of rounds that have ended.
    """

    config: Recovery
    last_step: Callable[[], int | None]
    resumed: Callable[[], Callable[[], int]]
    smaller: Callable[[End], str] = lambda end: ""
    taken: Callable[[], str] = lambda: ""
    rounds: int = field(default=0, init=False)
    _furthest: int = field(default=0, init=False)
    _in_vain: Counter[Retry] = field(default_factory=Counter, init=False)
    _seen: set[tuple[str, int]] = field(default_factory=set, init=False)
    _last: Retry | None = field(default=None, init=False)
    _samples: str = field(default="", init=False)
    _is_taken: str = field(default="", init=False)

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Callable[[], int] | None:
        """Return the entry of the next round's ranks, and print why there is one; None: there is none."""
        self.rounds += 1
        cause = first_cause(ends)
        if cause is None or result.code == 0:
            return None
        self._is_taken = self.taken()
        if self._is_taken:
            return None
        step = self.last_step() or 0
        kind, change = ends[cause].kind.retry, ""
        if step > self._furthest:
            self._furthest = step
            self._in_vain.clear()
        if kind is Retry.MEMORY and self._in_vain[kind] < self.config.budget(kind.value):
            change = self.smaller(ends[cause])
            if not change and ends[cause].kind in BY_KERNEL:  # perhaps for the memory that another process takes
                kind = Retry.TRANSIENT
        self._samples = "" if kind is Retry.MEMORY else advice_on_samples(ends[cause])
        self._last = kind
        if kind is Retry.ROLLBACK:
            print_on_stderr(f"lockstep: {gist(result.text)}\nlockstep: its ranks start again")
            return self.resumed()
        if self._in_vain[kind] >= self.config.budget(kind.value):
            return None
        if not (change or self._may_help(kind, ends[cause], step)):
            return None
        self._in_vain[kind] += 1
        text = result.text.replace(result.advice, "").rstrip() if result.advice else result.text
        line = raising_line(text)
        print_on_stderr(
            f"lockstep: {gist(text)}{f' (at {line})' if line is not None else ''}\n"
            f"lockstep: the run was at step {step:,} or later; its ranks start again, from the newest state"
            f"{change and '; '}{change}"
        )
        return self.resumed()

    def after_pause(self) -> Callable[[], int] | None:
        """Return the entry of ranks that were stopped to continue on other hosts; None: the folder is gone."""
        self._is_taken = self.taken()
        return None if self._is_taken else self.resumed()

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the result of the last round, with the number of those before, and what to do next."""
        before = self.rounds - 1
        if self._is_taken:
            kind = FailureKind.FAILED if result.kind is FailureKind.PAUSED else result.kind
            return replace(result, kind=kind, text=f"{result.text}\n{self._is_taken}: its ranks don't start again")
        if result.code == 0 or self._last is None:
            return result
        again = f"its ranks had been started again {counted(before, 'time')}" if before > 0 else ""
        advice = self._samples or (_ADVICE.get(self._last, "") if before > 0 else "")
        return replace(result, text="\n".join(filter(None, (result.text, again, advice))))

    def _may_help(self, kind: Retry, end: End, step: int) -> bool:
        """Return whether a failure may not come again; an exception of the program gets a second chance at a step."""
        if kind is not Retry.PROGRAM:
            return kind not in (Retry.NEVER, Retry.MEMORY)
        failure = (gist(end.text), step)
        is_new = failure not in self._seen and step > 0
        self._seen.add(failure)
        return is_new


def advice_on_samples(end: End) -> str:
    """Return what to do about the samples that a process was reading as it ended; empty if it was reading none."""
    if not end.samples or end.kind is FailureKind.SAMPLE:  # its message says it
        return ""
    mend = f"mend {Reading(end.samples, end.evaluation_set)}, or leave it out"
    if end.evaluation_set is not None:
        return f"{mend} of the set (data.leave_out is for training samples), then start the run again to resume"
    key = f"data.leave_out='[[{end.samples[0]}, {end.samples[0]}]]'" if len(end.samples) == 1 else "data.leave_out"
    return f"{mend} by {key}, then start the run again to resume (mended data may need --accept-changes)"
