"""The launchers of a run on several hosts: they meet, know how ranks end on each, and end alike.

    lockstep train ... --nodes 2 --rendezvous a:29500       the same command on each host

    host a (listens)   relay starts -- imports --.-- meet -- folder -- ranks -- watch -- first cause of all -- result
    host b             relay starts -- imports --'-- meet ------------ ranks -- watch ---------------------- result

The host at which HOST:PORT is a local address leads: it has node rank 0 and the first ranks, makes the run's folder,
and decides how the run has ended. Messages pass through a process of each launcher (`relay`).
"""

from __future__ import annotations

import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.control_groups import WhyKilled
from lockstep.core.errors import Problem, RunFailed, named_ranks
from lockstep.core.failure_kinds import FailureKind
from lockstep.launch.ends import End, end_fields, end_of_fields, with_cause
from lockstep.launch.outcome import LaunchResult, print_on_stderr, stopped_by
from lockstep.launch.relay_process import LOST_RELAY, RelayProcess

if TYPE_CHECKING:
    from lockstep.launch.group import SignalRequests

_OF_ROUND = ("folder", "end", "stop", "save", "gone", "lost", "arrived")  # messages that mean one round only
_LOST_NOTED = 4  # lost hosts that are noted; one that is cut off itself loses all others


class Hosts:
    """The other hosts of a run, as this one's launcher sees them.

    Attributes:
        leads: Whether this host has node rank 0.
        name: This host's.
        node: This host's node rank, once the hosts have met.
        world: All hosts by node rank, once they have met.
        address: This host's address on the network that connects them, once they have met.
        store_port: The port on loopback at which this host's ranks reach the store; 0 for the leader.
        ends: How ranks of other hosts have ended, or reported that they fail, by rank.
        why_killed: Returns why a rank of this host may have been killed by SIGKILL.
        recovers: Whether another round may follow after a failure.
        elastic: Whether a round may have fewer hosts than the one before.
        round: Number of the round.
        requests: The signals of this launcher, once it handles them.
        next: The number of the next round, once the leader has decided that there is one, and how this one has ended.
        lost_leader: Why the leader can't be reached; empty: it can.
        arrived: A host that waits to be taken in; empty: none.
        is_cut_off: Whether a host is silent, and another round may follow.
        has_gone: Whether a host has reported that it leaves the run, which ends for that.
        pauses: Whether this round's ranks have been stopped for it.
        decision: What the leader has decided for this round, as of `open_folder`.
        is_done: Whether the leader has reported that the run is done.
    """

    def __init__(self, relay: RelayProcess, name: str, *, leads: bool, recovers: bool = False) -> None:
        self.leads = leads
        self.name = name
        self.recovers = recovers
        self.elastic = False
        self.round = 0
        self.requests: SignalRequests | None = None
        self.next: tuple[int, LaunchResult] | None = None
        self.lost_leader = self.arrived = ""
        self.pauses = self.has_gone = self.is_cut_off = False
        self.is_done = False
        self.decision: Mapping[str, Any] = {}
        self.node = 0
        self.world: list[HostRanks] = []
        self.address = ""
        self.store_port = 0
        self.ends: dict[int, End] = {}
        self.why_killed: Callable[[], WhyKilled] = lambda: WhyKilled("")
        self._ended: set[int] = set()
        self._relay = relay
        self._published: dict[int, End] = {}
        self._stops_sent = self._saves_sent = 0
        self._result: LaunchResult | None = None
        self._folder: str | None = None
        self._lost = 0

    # --- facts, once they have met ---

    @property
    def here(self) -> HostRanks:
        return self.world[self.node]

    @property
    def size(self) -> int:
        """Number of ranks on all hosts."""
        return sum(host.ranks for host in self.world)

    def names(self) -> list[str]:
        """Return the name of each rank's host."""
        return [host.name for host in self.world for _ in range(host.ranks)]

    # --- before the ranks start ---

    def meet(self) -> None:
        """Wait until all hosts are there, or, of a host that has waited for a place, the run is done.

        Raises Failure if they don't come, or can't train together.
        """
        while not self.world and (self._result is None or self._result.code != 0):
            self._refuse_result()
            self._wait(self.requests)

    def open_folder(self, folder: Path, decision: Mapping[str, Any]) -> None:
        """Report to the others which folder the run has, and how their ranks start in it: they may."""
        self._send({"type": "folder", "path": str(folder), "decision": decision})

    def wait_for_folder(self) -> Path | None:
        """Return the folder that the leader has made for the run; None: nothing is left to train.

        Raises Failure if there is none.
        """
        while self._folder is None:
            if self._result is not None and self._result.code == 0:
                return None
            self._refuse_result()
            self._wait(self.requests)
        return Path(self._folder)

    # --- between rounds ---

    def begin_again(self, number: int) -> None:
        """Forget the round that has ended; this launcher is ready for another."""
        self.round = number
        self.world, self.ends, self.next = [], {}, None
        self.lost_leader = self.arrived = ""
        self.pauses = self.has_gone = self.is_cut_off = False
        self._ended, self._published, self._lost = set(), {}, 0
        self._result = self._folder = None

    def call(self, number: int, result: LaunchResult, wait: float, differing: tuple[int, ...] = ()) -> None:
        """Let all hosts meet within `wait` seconds; only the leader does. `differing`: ranks with wrong copies."""
        lost = [node for node in range(1, len(self.world)) if self._is_lost(node)]
        wrong = [node for node, host in enumerate(self.world) if not set(host.span).isdisjoint(differing)]
        fields = {"kind": result.kind.name, "text": result.text, "wait": wait, "lost": lost, "differing": wrong}
        self.begin_again(number)
        self._meet_again({"type": "next", **fields})

    def answer(self) -> None:
        """Report that this host is ready for the next round, for which the leader has called."""
        assert self.next is not None
        self.begin_again(self.next[0])
        self._send({"type": "ready"})

    def look_for_leader(self, wait: float) -> None:
        """Connect with the leader again, which is lost, for up to `wait` seconds."""
        self.begin_again(0)
        self._meet_again({"type": "again", "wait": wait})

    def _meet_again(self, message: Mapping[str, Any]) -> None:
        if self._relay.has_ended:
            self._relay.restart(round=self.round, timeout=message["wait"], limit="recovery.host_wait")
        else:
            self._send(message)

    def pause_is_due(self) -> bool:
        """Return, once, whether the ranks have to stop because a host waits to be taken in."""
        if not self.arrived or self.pauses:
            return False
        self.pauses = True
        print_on_stderr(f"lockstep: host {self.arrived} has come: all ranks save, and start again with it")
        return True

    def _is_lost(self, node: int) -> bool:
        return any(rank in self.ends and self.ends[rank].kind is FailureKind.LOST for rank in self.world[node].span)

    def open_store(self, port: int) -> None:
        """Let the ranks of other hosts reach the store, which listens on this port of loopback."""
        self._send({"type": "store", "port": port})

    # --- while the ranks run ---

    def readable(self) -> list[int | Connection]:
        """Return the descriptors that become readable when another launcher reports something."""
        return [] if self._relay.has_ended else [self._relay.channel]

    def update(self, requests: SignalRequests) -> None:
        """Receive what other launchers have reported."""
        while not self._relay.has_ended and self._relay.channel.poll():
            self._receive(requests)

    def publish(self, ends: Mapping[int, End], ended: set[int], requests: SignalRequests) -> None:
        """Report to the other launchers how ranks of this host have ended, and what signals have requested here.

        Args:
            ends: Of the ranks that have reported or ended.
            ended: Those whose processes are gone.
        """
        for rank, end in ends.items():
            if self._published.get(rank) != end or (rank in ended and rank not in self._ended):
                self._published[rank] = end
                if rank in ended:
                    self._ended.add(rank)
                fields = end_fields(with_cause(end, self.why_killed))
                self._send({"type": "end", "rank": rank, "ended": rank in ended, "end": fields})
        if requests.own_stops > self._stops_sent and requests.last_stop is not None:
            self._stops_sent = requests.own_stops
            self._send({"type": "stop", "count": self._stops_sent, "signal": int(requests.last_stop)})
        while requests.own_saves > self._saves_sent:
            self._saves_sent += 1
            self._send({"type": "save"})

    def others_have_ended(self) -> bool:
        """Return whether all ranks of other hosts have ended, or can't be reached."""
        return all(rank in self._ended for rank in range(self.size) if rank not in self.here.span)

    def give_up(self, seconds: float) -> None:
        """Count hosts as lost whose launchers have not reported for some seconds how their ranks ended."""
        for node, host in enumerate(self.world):
            if node != self.node and not self._ended.issuperset(host.span):
                self._lose_host({"node": node, "why": f"its launcher hasn't ended its ranks within {seconds:g} s"})

    # --- the end ---

    def wait_for_result(self, requests: SignalRequests) -> LaunchResult:
        """Return how the run has ended on all hosts, as the leader has decided."""
        stops = requests.own_stops
        while self._result is None:
            if self.next is not None and requests.own_stops and requests.last_stop is not None:
                self.next, result = None, stopped_by(requests.last_stop)
                self.fail(result.kind, f"{result.text} on host {self.name}")
                return result
            if self.next is not None:
                return self.next[1]
            if self._relay.has_ended:
                raise RunFailed(f"the run's end isn't known: {LOST_RELAY}")
            self._wait(requests)
            if requests.own_stops > stops and requests.last_stop is not None:
                return stopped_by(requests.last_stop)
        return self._result

    def finish(self, result: LaunchResult) -> None:
        """Report how the run has ended to all hosts; only the leader does."""
        problems = [[problem.where, problem.key, problem.message] for problem in result.problems]
        fields = {"kind": result.kind.name, "text": result.text, "is_traceback": result.is_traceback}
        self._send({"type": "result", **fields, "problems": problems})

    def fail(self, kind: FailureKind, text: str) -> None:
        """Report that this host can't take part."""
        self._send({"type": "result" if self.leads else "gone", "kind": kind.name, "text": text})

    def close(self) -> None:
        """End the relay, once it has sent what it has."""
        self._relay.close()

    # --- messages ---

    def _send(self, message: Mapping[str, Any]) -> None:
        self._relay.send({"round": self.round, **message})

    def _wait(self, requests: SignalRequests | None) -> None:
        multiprocessing.connection.wait([*self.readable(), *([] if requests is None else [requests.fileno()])])
        if requests is not None:
            requests.drain()
        if not self._relay.has_ended and self._relay.channel.poll():
            self._receive(requests)

    def _refuse_result(self) -> None:
        if self._result is not None:
            raise self._result.failure()
        if self.requests is not None and self.requests.stops and self.requests.last_stop is not None:
            raise stopped_by(self.requests.last_stop).failure()
        decides = self.recovers and not self.has_gone  # the leader, whether the run continues without a lost host
        for rank, end in self.ends.items():
            if (
                end.kind is not FailureKind.DONE
                and rank in self._ended
                and not (decides and end.kind is FailureKind.LOST)
            ):
                raise LaunchResult(end.cause, end.text).failure()
        if self._relay.has_ended:
            raise RunFailed(LOST_RELAY)

    def _receive(self, requests: SignalRequests | None) -> None:
        message = self._relay.receive()
        if message is None:
            self._lose_relay()
            return
        if message["type"] in _OF_ROUND and message.get("round", self.round) != self.round:
            return
        match message["type"]:
            case "note":
                print_on_stderr(f"note: {message['text']}")
            case "world":
                self._join(message)
            case "folder":
                self._folder, self.decision = message["path"], message["decision"]
            case "next":
                self.next = message["round"], LaunchResult(FailureKind[message["kind"]], message["text"])
            case "arrived":
                self.arrived = message["host"]
            case "result":
                problems = tuple(Problem(*fields) for fields in message.get("problems", ()))
                traceback = message.get("is_traceback", False)
                self._result = LaunchResult(FailureKind[message["kind"]], message["text"], traceback, problems)
                self.is_done = self._result.code == 0
            case "end":
                self._note_end(message)
            case "stop" if requests is not None:
                requests.stop_elsewhere(message["count"], signal.Signals(message["signal"]))
            case "save" if requests is not None:
                requests.save_elsewhere()
            case "gone":  # it reports why, instead of starting its ranks
                self._note_gone(message)
            case "lost":
                self._lose_host(message)

    def _join(self, message: Mapping[str, Any]) -> None:
        self.round, self.world = message["round"], in_order(message["hosts"])
        self.node, self.address = message["node"], message["address"]
        self.store_port = message.get("port", 0)

    def _note_gone(self, message: Mapping[str, Any]) -> None:
        """Note that a host leaves. A stop, or any failure in the first round, ends the run; later that host is lost."""
        kind = FailureKind[message["kind"]]
        self.has_gone |= kind.is_stop or self.round == 1
        text = message["text"] if kind.is_stop else f"host {self.world[message['node']].name}: {message['text']}"
        left_by = kind if self.has_gone else None
        self._lose(message["node"], End(FailureKind.LOST, text, time.monotonic(), left_by=left_by))

    def _note_end(self, message: Mapping[str, Any]) -> None:
        end = end_of_fields(message["end"])
        known = self.ends.get(message["rank"])
        self.ends[message["rank"]] = end if known is None else replace(end, time=min(end.time, known.time))
        if message["ended"]:
            self._ended.add(message["rank"])

    def _lose_host(self, message: Mapping[str, Any]) -> None:
        if not self.world:
            self.lost_leader = f"the launcher at the rendezvous has ended: {message['why']}"
            self._result = LaunchResult(FailureKind.LOST, self.lost_leader)
            return
        host = self.world[message["node"]]
        text = f"host {host} is lost: {message['why']}"
        self.is_cut_off |= self.recovers and message.get("silent", False)
        has_ended = self._ended.issuperset(host.span)
        if not has_ended and self._lost < _LOST_NOTED:
            self._lost += 1
            what = "its ranks are ended" if self.recovers else "the run ends"
            print_on_stderr(f"note: {text}; {what}")  # at once: ranks that wait for that host end seconds later
        self._lose(message["node"], End(FailureKind.LOST, text, time.monotonic()))
        if message["node"] == 0:  # all messages came through it
            self._lose_leader(text)
            for node in range(1, len(self.world)):
                if node != self.node:
                    self._lose(node, End(FailureKind.ENDED, "", time.monotonic()))

    def _lose_relay(self) -> None:
        if self.recovers and not self.leads:
            self._lose_leader(LOST_RELAY)
        for node in range(len(self.world)):
            if node != self.node:
                self._lose(node, End(FailureKind.LOST, LOST_RELAY, time.monotonic()))

    def _lose_leader(self, why: str) -> None:
        if self._result is None:  # else the run has ended
            self.lost_leader, self._result = why, LaunchResult(FailureKind.LOST, why)

    def _lose(self, node: int, end: End) -> None:
        for rank in self.world[node].span:
            if rank not in self._ended:
                self.ends[rank] = end
                self._ended.add(rank)


@dataclass(frozen=True, slots=True)
class HostRanks:
    """A host of the run, and its ranks: `first`, `first + 1`, ..."""

    name: str
    first: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.name} ({named_ranks(self.span)})"

    @property
    def span(self) -> range:
        return range(self.first, self.first + self.ranks)


def in_order(hosts: Sequence[Mapping[str, Any]]) -> list[HostRanks]:
    """Return the hosts of a round, with `host` and `ranks` of each by node rank, and the ranks of each."""
    placed: list[HostRanks] = []
    for host in hosts:
        first = placed[-1].span.stop if placed else 0
        placed.append(HostRanks(host["host"], first, host["ranks"]))
    return placed
