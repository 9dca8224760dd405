"""Starts the ranks again after failures that another round may not meet.

    round 1   ranks --> rank 1 was killed, at step 120      --> again, from the newest checkpoint
    round 2   ranks --> rank 0 was killed, at step 340      --> again: the run has got further
    round 3   ranks --> KeyError at step 400                --> once more: it may have been the host
    round 4   ranks --> KeyError at step 400                --> ends: it is the program, or its data

Ranks are forked from the launcher, which has imported what they need. What a person has requested, and what a start of
the same run would meet again (a config that can't be trained, memory that runs out, a message of Lockstep), ends the
run in the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lockstep.launch.ends import End, EndKind, first_cause
from lockstep.launch.ends_file import gist
from lockstep.launch.outcome import LaunchResult, print_on_stderr

if TYPE_CHECKING:
    from lockstep.config.training_sections import Recovery

_LOST = {EndKind.KILLED, EndKind.STOPPED, EndKind.TIMED_OUT, EndKind.PEER_FAILED, EndKind.LOST}
"""Ends that happen to a rank: nothing in its program has to be the cause."""
_OF_PROGRAM = {EndKind.TRACEBACK, EndKind.EXITED, EndKind.CODE}


@dataclass
class Supervisor:
    """Decides after each round whether there is another one.

    Attributes:
        config: How many rounds there may be that don't get further.
        last_step: Returns the last update that the run's history has.
        resumed: Returns the entry of a rank that resumes from what the rounds before have saved.
        rounds: Number of rounds that have ended.
    """

    config: Recovery
    last_step: Callable[[], int | None]
    resumed: Callable[[], Callable[[], int]]
    rounds: int = field(default=0, init=False)
    _furthest: int = field(default=-1, init=False)
    _in_vain: int = field(default=0, init=False)
    _seen: set[tuple[str, int]] = field(default_factory=set, init=False)

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Callable[[], int] | None:
        """Return the entry of the next round's ranks, and print why there is one; None: there is none."""
        self.rounds += 1
        cause = first_cause(ends)
        if cause is None or result.code == 0:
            return None
        step = self.last_step() or 0
        self._in_vain = 0 if step > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, step)
        if self._in_vain >= self.config.restarts or not self._may_help(ends[cause], step):
            return None
        print_on_stderr(
            f"lockstep: {gist(result.text)}\n"
            f"lockstep: the run was at step {step:,} or later; its ranks start again, from the newest checkpoint"
        )
        return self.resumed()

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the result of the last round, with the number of those before."""
        before = self.rounds - 1
        if result.code == 0 or before <= 0:
            return result
        times = "once" if before == 1 else f"{before} times"
        return replace(result, text=f"{result.text}\nits ranks had been started again {times}, after other failures")

    def _may_help(self, end: End, step: int) -> bool:
        if end.kind in _LOST:
            return True
        failure = gist(end.text), step
        is_new = failure not in self._seen
        self._seen.add(failure)
        return end.kind in _OF_PROGRAM and is_new
