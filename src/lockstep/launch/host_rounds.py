"""Further rounds of a run on several hosts: the leader decides, and all launchers start the next round alike.

    leader      ends --> supervisor: again? --> calls all hosts --> they meet --> folder, decision --> ranks
    follower    ends -----------------------> is called, is ready --> meets -------------------------> ranks
                leader lost ----------------> looks for it, for recovery.host_wait ------------------> ranks

Only what meets the leader trains: of a network that is cut in two, the half without the leader waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import Failure, Stopped, message_of
from lockstep.core.failure_kinds import FailureKind
from lockstep.launch.ends import first_cause
from lockstep.launch.ends_file import gist
from lockstep.launch.outcome import LaunchResult, print_on_stderr
from lockstep.launch.relay_process import LOST_RELAY

if TYPE_CHECKING:
    from lockstep.launch.ends import End
    from lockstep.launch.hosts import Hosts
    from lockstep.launch.supervision import Supervisor

Entry = Callable[[], int]
_READY_S = 30.0  # that hosts have at least to end their ranks
_OF_PAUSE = {
    FailureKind.PAUSED,
    FailureKind.STOPPED,
    FailureKind.INTERRUPTED,
    FailureKind.ENDED,
    FailureKind.PEER_FAILED,
}


@dataclass
class LeaderRounds:
    """Decides after each round whether there is another, and calls the other hosts.

    Attributes:
        supervisor: Decides after failures.
        wait: Seconds that hosts have to come back; 0: a lost one ends the run.
        elastic: Whether fewer hosts may continue.
        folder: Of the run.
        decision: Returns what other hosts have to know of how an entry starts.
    """

    hosts: Hosts
    supervisor: Supervisor
    wait: float
    elastic: bool
    folder: Path
    decision: Callable[[Entry], Mapping[str, Any]]
    _failure: Failure | None = field(default=None, init=False)

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Entry | None:
        """Return the entry of the next round's ranks once its hosts are there; None: there is no other round."""
        cause = first_cause(ends)
        is_lost = cause is not None and ends[cause].kind is FailureKind.LOST
        if is_lost and (self.hosts.has_gone or not (self.wait or self.elastic)):
            return None
        again = self.supervisor.after_pause() if self._is_paused(ends) else self.supervisor.next_entry(ends, result)
        if again is None:
            return None
        try:
            wait = self.wait if is_lost and not self.elastic else max(self.wait, _READY_S)
            self.hosts.call(self.hosts.round + 1, result, wait, ends[cause].differing if cause is not None else ())
            self.hosts.meet()
        except Failure as failure:
            self._failure = failure
            return None
        print_on_stderr(f"lockstep: round {self.hosts.round} trains on {described(self.hosts)}")
        self.hosts.open_folder(self.folder, self.decision(again))
        return again

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the run's result, of which this was the last round's."""
        if self._failure is None:
            return self.supervisor.concluded(result)
        text = f"{gist(result.text)}\n{message_of(self._failure)}"
        return LaunchResult(self._failure.kind, text, cut_off=isinstance(self._failure, Stopped))

    def _is_paused(self, ends: Sequence[End]) -> bool:
        cause = first_cause(ends)
        return self.hosts.pauses and cause is not None and ends[cause].kind in _OF_PAUSE


@dataclass
class FollowerRounds:
    """Does what the leader decides after each round.

    Attributes:
        wait: Seconds that the leader has to come back; 0: its loss ends the run.
        entry: Returns the entry of ranks that train in a folder as the leader has decided.
    """

    hosts: Hosts
    wait: float
    entry: Callable[[Path, Mapping[str, Any]], Entry]
    _result: LaunchResult | None = field(default=None, init=False)

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Entry | None:
        """Return the entry of the next round's ranks once its hosts are there; None: there is no other round."""
        while self.hosts.next is not None or (self.hosts.lost_leader and self.wait):
            try:
                if folder := self._met(result):
                    print_on_stderr(f"lockstep: round {self.hosts.round} trains on {described(self.hosts)}")
                    return self.entry(folder, self.hosts.decision)
                self._result = LaunchResult(FailureKind.DONE)
            except Failure as failure:
                if not self.hosts.lost_leader:
                    self._result = self._left(failure)
        return None

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the run's result, of which this was the last round's."""
        return self._result or result

    def _left(self, failure: Failure) -> LaunchResult:
        """Return the run's result after a failure between rounds, of this host or of the run."""
        result = LaunchResult.of(failure)
        where = f" on host {self.hosts.name}" if isinstance(failure, Stopped) else ""
        self.hosts.fail(result.kind, result.text + where)
        return result

    def _met(self, result: LaunchResult) -> Path | None:
        """Return the run's folder once all hosts of the round are there; None: nothing is left to train."""
        hosts = self.hosts
        if hosts.next is not None:
            print_on_stderr(f"lockstep: {gist(result.text)}\nlockstep: all ranks start again")
            hosts.answer()
        else:
            whom = "node 0" if hosts.lost_leader == LOST_RELAY else "it; start the same command there again"
            wait = f"this host waits up to {self.wait:g} s (recovery.host_wait) for {whom}"
            print_on_stderr(f"lockstep: {hosts.lost_leader}\nlockstep: {wait}")
            hosts.look_for_leader(self.wait)
        hosts.meet()
        return hosts.wait_for_folder()


def described(hosts: Hosts) -> str:
    """Return how many hosts a run has, and their ranks."""
    number = len(hosts.world)
    return f"{number} host{'s' * (number > 1)}: {', '.join(str(host) for host in hosts.world)}"
