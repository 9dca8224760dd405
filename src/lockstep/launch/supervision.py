"""Starts the ranks again after failures that another round may not meet.

    round 1   ranks --> rank 1 was killed, at step 120      transient  --> again, from the newest state
    round 2   ranks --> rank 0 was killed, at step 340      transient  --> again: the run has got further
    round 3   ranks --> KeyError at step 400                program    --> once more: it may have been the host
    round 4   ranks --> KeyError at step 400                program    --> ends: it is the program, or its data

Ranks are forked from the launcher, which has imported what they need. What a person has requested, and what a start of
the same run would meet again (a config that can't be trained, a message of Lockstep), ends the run in the first round.
After memory has run out, the next round has smaller micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from lockstep.core.errors import Paused, RunFailed
from lockstep.launch.ends import End, first_cause
from lockstep.launch.ends_file import gist
from lockstep.launch.failure_kinds import (
    NEVER_RETRIED,
    FailureKind,
    advice_after,
    advice_on_samples,
    kind_of,
    was_killed,
)
from lockstep.launch.outcome import LaunchResult, print_on_stderr
from lockstep.launch.rank_stacks import raising_line

if TYPE_CHECKING:
    from lockstep.config.training_sections import Recovery


class Rounds(Protocol):
    """The further rounds of a launch: those of a `Supervisor`, or of several hosts (`host_rounds`)."""

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Callable[[], int] | None: ...
    def concluded(self, result: LaunchResult) -> LaunchResult: ...


@dataclass
class Supervisor:
    """Decides after each round whether there is another one.

    Attributes:
        config: How many rounds there may be that don't get further.
        last_step: Returns the last update that the run has recorded or saved.
        resumed: Returns the entry of a rank that resumes from what the rounds before have saved.
        smaller: Makes micro-batches smaller after memory has run out; returns what changes, empty if nothing can.
        may_be_smaller: Returns whether `smaller` would change anything.
        taken: Returns why the run's folder isn't there any more, so that no ranks may start there; empty: it is.
        rounds: Number of rounds that have ended.
    """

    config: Recovery
    last_step: Callable[[], int | None]
    resumed: Callable[[], Callable[[], int]]
    smaller: Callable[[End], str] = lambda end: ""
    may_be_smaller: Callable[[End], bool] = lambda end: False
    taken: Callable[[], str] = lambda: ""
    rounds: int = field(default=0, init=False)
    _furthest: int = field(default=0, init=False)
    _in_vain: Counter[FailureKind] = field(default_factory=Counter, init=False)
    _seen: set[tuple[str, int]] = field(default_factory=set, init=False)
    _last: FailureKind | None = field(default=None, init=False)
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
        kind, change = kind_of(ends[cause], result.text), ""
        if step > self._furthest:
            self._furthest = step
            self._in_vain.clear()
        if kind is FailureKind.MEMORY and self._in_vain[kind] < self.config.budget(kind.value):
            change = self.smaller(ends[cause])
            if not change and was_killed(ends[cause]):  # perhaps for the memory that another process takes
                kind = FailureKind.TRANSIENT
        self._samples = "" if kind is FailureKind.MEMORY else advice_on_samples(ends[cause])
        self._last = kind
        if kind is FailureKind.ROLLBACK:
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

    def retries(self, end: End, text: str) -> bool:
        """Return whether another round may follow a failure; `next_entry` decides whether one does."""
        kind, step = kind_of(end, text), self.last_step() or 0
        if kind is FailureKind.ROLLBACK:
            return True
        if kind in NEVER_RETRIED or self._is_spent(kind, step):
            return False
        if kind is FailureKind.MEMORY and not self.may_be_smaller(end):
            return was_killed(end) and not self._is_spent(FailureKind.TRANSIENT, step)
        return kind is not FailureKind.PROGRAM or self._is_new(end, step)

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the result of the last round, with the number of those before, and what to do next."""
        before = self.rounds - 1
        if self._is_taken:
            code = RunFailed.exit_code if result.code == Paused.exit_code else result.code
            return replace(result, code=code, text=f"{result.text}\n{self._is_taken}: its ranks don't start again")
        if result.code == 0 or self._last is None:
            return result
        times = "once" if before == 1 else f"{before} times"
        how = ", since memory ran out" if self._last is FailureKind.MEMORY else ""
        again = f"its ranks had been started again {times}{how}" if before > 0 else ""
        advice = self._samples or (advice_after(self._last) if before > 0 else "")
        text = "\n".join(line for line in (result.text, again, advice) if line)
        return replace(result, text=text)

    def _is_spent(self, kind: FailureKind, step: int) -> bool:
        """Return whether there is no budget left for a failure of this kind at a step."""
        in_vain = 0 if step > self._furthest else self._in_vain[kind]
        return in_vain >= self.config.budget(kind.value)

    def _may_help(self, kind: FailureKind, end: End, step: int) -> bool:
        """Return whether a failure may not come again; an exception of the program gets a second chance at a step."""
        if kind in NEVER_RETRIED or kind is FailureKind.MEMORY:
            return False
        if kind is not FailureKind.PROGRAM:
            return True
        is_new = self._is_new(end, step)
        self._seen.add((gist(end.text), step))
        return is_new

    def _is_new(self, end: End, step: int) -> bool:
        return (gist(end.text), step) not in self._seen and step > 0
