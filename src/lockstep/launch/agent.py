"""The launchers of a run on several hosts: they meet, know how ranks end on each, and end alike.

The host with the rendezvous as a local address leads: it has node rank 0, makes the run's folder, and decides how
the run has ended, and whether there is another round. Messages pass through a process of each launcher (`proxy`):

    MEETING --> RUNNING --> CALLED, the leader wants another round --> MEETING --> ... --> OVER
                   '------> CUT_OFF, the leader is lost: looks for it, for recovery.host_wait --> MEETING

Only what meets the leader trains: of a network that is cut in two, the half without the leader waits.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.control_groups import WhyKilled
from lockstep.core.errors import Failure, Problem, RunFailed, Stopped, message_of, named_ranks
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import counted
from lockstep.core.stopping import SignalRequests, blocked_signals
from lockstep.launch.ends import CAUSED_BY_STOP, End, end_fields, end_of_fields, first_cause, with_cause
from lockstep.launch.outcome import LaunchResult, gist, print_on_stderr, stopped_by

if TYPE_CHECKING:
    from lockstep.launch.supervision import Supervisor

Entry = Callable[[], int]
_LOST_PROXY = "the process that connects this host with the others has ended"
_OF_ROUND = ("folder", "end", "stop", "save", "gone", "lost", "arrived")  # messages that mean one round only
_PROXY_ENDS_S = 10.0
_READY_S = 30.0  # that hosts have at least to end their ranks
_ROOT = str(Path(__file__).parents[2])
_OF_PAUSE = (FailureKind.PAUSED, *CAUSED_BY_STOP)


class ProxyProcess:
    """A launcher's proxy, and the channel for their messages.

    Args:
        listener: The socket at the rendezvous, which it takes over; None: another host listens there.
    """

    def __init__(self, listener: socket.socket | None, order: Mapping[str, Any]) -> None:
        self.has_ended = False
        own, its = socket.socketpair()
        self.channel = Connection(own.detach())
        sockets = [its] if listener is None else [its, listener]
        numbers = [each.fileno() for each in sockets]
        arguments = ", ".join(map(str, (numbers[0], -1 if listener is None else numbers[1], os.getpid())))
        code = f"import sys; sys.path.append({_ROOT!r}); from lockstep.launch.proxy import main; main({arguments})"
        words = [sys.executable, "-P", "-c", code]
        with blocked_signals(forks=True):  # until it ignores them
            self._process = subprocess.Popen(words, pass_fds=numbers, stdin=subprocess.DEVNULL)
        for each in sockets:
            each.close()
        self.send(order)

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended; `receive` finds that
            self.channel.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None: the proxy has ended."""
        try:
            message: dict[str, Any] = json.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            self.has_ended = True
            return None
        return message

    def close(self) -> None:
        """End it, once it has sent what it has."""
        self.channel.close()
        try:
            self._process.wait(_PROXY_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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


class LaunchState(Enum):
    """States of the run, as a launcher knows them."""

    MEETING = auto()
    RUNNING = auto()
    CALLED = auto()
    CUT_OFF = auto()
    OVER = auto()


class Hosts:
    """The other hosts of a run, as this one's launcher sees them.

    Attributes:
        leads: Whether this host has node rank 0.
        node, address, world: Node rank and address of this host, and all hosts by node rank, once they have met.
        store_port: The port on loopback where this host's ranks reach the store; 0 for the leader.
        ends: How ranks of other hosts have ended, or reported that they fail, by rank.
        recovers: Whether another round may follow after a failure; `elastic`: with fewer hosts.
        result: How the run has ended, the round (CALLED), or why the leader is lost (CUT_OFF).
        pauses: Whether this round's ranks have been stopped because a host waits to be taken in.
        decision: What the leader has decided for this round, as of `open_folder`.
    """

    def __init__(self, proxy: ProxyProcess, name: str, *, leads: bool, recovers: bool = False) -> None:
        self.leads = leads
        self.name = name
        self.recovers = recovers
        self.elastic = False
        self.requests: SignalRequests | None = None
        self.decision: Mapping[str, Any] = {}
        self.node = self.store_port = self._next_round = 0
        self.address = ""
        self.why_killed: Callable[[], WhyKilled] = lambda: WhyKilled("")
        self._proxy = proxy
        self._stops_sent = self._saves_sent = 0
        self.begin_again(0)

    def begin_again(self, number: int) -> None:
        """Forget the round that has ended; this launcher is ready for another."""
        self.round, self.state = number, LaunchState.MEETING
        self.result: LaunchResult | None = None
        self.world: list[HostRanks] = []
        self.ends: dict[int, End] = {}
        self.pauses = False
        self._arrived = ""
        self._ended: set[int] = set()
        self._published: dict[int, End] = {}
        self._folder: str | None = None

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

    @property
    def is_done(self) -> bool:
        """True if the leader has reported that the run is done."""
        return self.state is LaunchState.OVER and self.result is not None and self.result.code == 0

    # --- before the ranks start ---

    def meet(self) -> None:
        """Wait until all hosts are there, or the run is done. Raises Failure if they can't train together."""
        self._wait_until(lambda: bool(self.world))

    def open_folder(self, folder: Path, decision: Mapping[str, Any]) -> None:
        """Tell the others which folder the run has, and how their ranks start in it."""
        self._send({"type": "folder", "path": str(folder), "decision": decision})

    def wait_for_folder(self) -> Path | None:
        """Return the folder that the leader has made for the run; None: nothing is left to train. Raises Failure."""
        self._wait_until(lambda: self._folder is not None)
        return None if self._folder is None else Path(self._folder)

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        """Receive messages until something is there, or the run is done. Raises Failure."""
        while not is_there() and not self.is_done:
            if self.result is not None and self.state is not LaunchState.CALLED:
                raise self.result.failure()
            if self.requests is not None and self.requests.stops and self.requests.last_stop is not None:
                raise stopped_by(self.requests.last_stop).failure()
            for rank in self._ended & self.ends.keys():
                end = self.ends[rank]  # after the loss of a host, the leader decides whether the run continues
                is_left = end.kind is FailureKind.LOST and end.left_by is None and self.recovers
                if end.kind is not FailureKind.DONE and not is_left:
                    raise LaunchResult(end.cause, end.text).failure()
            self._wait()

    # --- between rounds ---

    def call(self, result: LaunchResult, wait: float) -> None:
        """Let all hosts meet again within `wait` seconds; only the leader does."""
        gone = {rank for rank, end in self.ends.items() if end.kind is FailureKind.LOST}
        lost = [node for node in range(1, len(self.world)) if not gone.isdisjoint(self.world[node].span)]
        self.begin_again(self.round + 1)
        self._send({"type": "next", "kind": result.kind.name, "text": result.text, "wait": wait, "lost": lost})

    def answer(self) -> None:
        """Report that this host is ready for the next round, which the leader has called for."""
        self.begin_again(self._next_round)
        self._send({"type": "ready"})

    def look_for_leader(self, wait: float) -> None:
        """Connect with the leader again, which is lost, for up to `wait` seconds."""
        self.begin_again(0)
        self._send({"type": "again", "wait": wait})

    def pause_is_due(self) -> bool:
        """Return, once, whether the ranks have to stop because a host waits to be taken in."""
        if not self._arrived or self.pauses:
            return False
        self.pauses = True
        print_on_stderr(f"lockstep: host {self._arrived} has come: all ranks save, and start again with it")
        return True

    def open_store(self, port: int) -> None:
        """Let the ranks of other hosts reach the store, which listens on this port of loopback."""
        self._send({"type": "store", "port": port})

    # --- while the ranks run ---

    def readable(self) -> list[int | Connection]:
        """Return the descriptors that become readable when another launcher reports something."""
        return [] if self._proxy.has_ended else [self._proxy.channel]

    def update(self) -> None:
        """Receive what other launchers have reported."""
        while not self._proxy.has_ended and self._proxy.channel.poll():
            self._receive()

    def publish(self, ends: Mapping[int, End], ended: set[int], requests: SignalRequests) -> None:
        """Tell the other launchers how ranks of this host have reported or ended, and what signals have requested."""
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
        """Count hosts as lost if their launchers haven't reported for some seconds how their ranks ended."""
        for node, host in enumerate(self.world):
            if node != self.node and not self._ended.issuperset(host.span):
                self._lose_host(node, f"its launcher hasn't ended its ranks within {seconds:g} s")

    # --- the end ---

    def wait_for_result(self, requests: SignalRequests) -> LaunchResult:
        """Return how the run, or its round, has ended on all hosts, as the leader has decided."""
        stops = requests.own_stops
        while self.result is None:
            self._wait()
            if requests.own_stops > stops and requests.last_stop is not None:
                return stopped_by(requests.last_stop)
        if self.state is LaunchState.CALLED and requests.own_stops and requests.last_stop is not None:
            self.state, result = LaunchState.OVER, stopped_by(requests.last_stop)
            self.fail(result.kind, f"{result.text} on host {self.name}")
            return result
        return self.result

    def finish(self, result: LaunchResult) -> None:
        """Tell all hosts how the run has ended; only the leader does."""
        fields = {"kind": result.kind.name, "text": result.text, "is_traceback": result.is_traceback}
        self._send({"type": "result", **fields, "problems": [astuple(each) for each in result.problems]})

    def fail(self, kind: FailureKind, text: str) -> None:
        """Report that this host can't take part."""
        self._send({"type": "result" if self.leads else "gone", "kind": kind.name, "text": text})

    def close(self) -> None:
        """End the proxy, once it has sent what it has."""
        self._proxy.close()

    # --- messages ---

    def _send(self, message: Mapping[str, Any]) -> None:
        self._proxy.send({"round": self.round, **message})

    def _wait(self) -> None:
        if self._proxy.has_ended:
            raise RunFailed(_LOST_PROXY)
        requests = [] if self.requests is None else [self.requests.fileno()]
        multiprocessing.connection.wait([*self.readable(), *requests])
        if self.requests is not None:
            self.requests.drain()
        if self._proxy.channel.poll():
            self._receive()

    def _receive(self) -> None:
        message = self._proxy.receive()
        if message is None:
            self._lose_proxy()
            return
        if message["type"] in _OF_ROUND and message.get("round", self.round) != self.round:
            return
        match message["type"]:
            case "note":
                print_on_stderr(f"note: {message['text']}")
            case "world":
                self._begin(message)
            case "folder":
                self._folder, self.decision = message["path"], message["decision"]
            case "next":
                self._next_round = message["round"]
                self._conclude(LaunchState.CALLED, LaunchResult(FailureKind[message["kind"]], message["text"]))
            case "arrived":
                self._arrived = message["host"]
            case "result":
                problems = tuple(Problem(*fields) for fields in message.get("problems", ()))
                kind, is_traceback = FailureKind[message["kind"]], message.get("is_traceback", False)
                self._conclude(LaunchState.OVER, LaunchResult(kind, message["text"], is_traceback, problems))
            case "end":
                end, known = end_of_fields(message["end"]), self.ends.get(message["rank"])
                self.ends[message["rank"]] = end if known is None else replace(end, time=min(end.time, known.time))
                if message["ended"]:
                    self._ended.add(message["rank"])
            case "stop" if self.requests is not None:
                self.requests.other_stops = max(self.requests.other_stops, message["count"])
                self.requests.last_stop = self.requests.last_stop or signal.Signals(message["signal"])
            case "save" if self.requests is not None:
                self.requests.other_saves += 1
            case "gone":  # it reports why, instead of starting its ranks
                self._note_gone(message["node"], FailureKind[message["kind"]], message["text"])
            case "lost":
                self._lose_host(message["node"], message["why"])

    def _conclude(self, state: LaunchState, result: LaunchResult) -> None:
        if self.state is not LaunchState.OVER:
            self.state, self.result = state, result

    def _begin(self, message: Mapping[str, Any]) -> None:
        self.round, self.state = message["round"], LaunchState.RUNNING
        self.node, self.address = message["node"], message["address"]
        self.store_port = message.get("port", 0)
        self.world = []
        for host in message["hosts"]:
            self.world.append(HostRanks(host["host"], self.size, host["ranks"]))

    def _note_gone(self, node: int, kind: FailureKind, text: str) -> None:
        """Note that a host leaves. A stop, or any failure in the first round, ends the run; later that host is lost."""
        text = text if kind.is_stop else f"host {self.world[node].name}: {text}"
        left_by = kind if kind.is_stop or self.round == 1 else None
        self._lose(node, End(FailureKind.LOST, text, time.monotonic(), left_by=left_by))

    def _lose_host(self, node: int, why: str) -> None:
        if not self.world:
            text = f"the launcher at the rendezvous has ended before all hosts had come: {why}"
            self._conclude(LaunchState.CUT_OFF, LaunchResult(FailureKind.LOST, text))
            return
        text = f"host {self.world[node]} is lost: {why}"
        if not self._ended.issuperset(self.world[node].span):
            what = "its ranks are ended" if self.recovers else "the run ends"
            print_on_stderr(f"note: {text}; {what}")  # at once: ranks that wait for that host end seconds later
        self._lose(node, End(FailureKind.LOST, text, time.monotonic()))
        if node == 0:  # all messages came through it
            self._conclude(LaunchState.CUT_OFF, LaunchResult(FailureKind.LOST, text))
            for other in range(1, len(self.world)):
                if other != self.node:
                    self._lose(other, End(FailureKind.ENDED, "", time.monotonic()))

    def _lose_proxy(self) -> None:
        self._conclude(LaunchState.OVER, LaunchResult(FailureKind.FAILED, _LOST_PROXY))
        end = End(FailureKind.LOST, _LOST_PROXY, time.monotonic(), left_by=FailureKind.FAILED)
        for node in range(len(self.world)):
            if node != self.node:
                self._lose(node, end)

    def _lose(self, node: int, end: End) -> None:
        for rank in self.world[node].span:
            if rank not in self._ended:
                self.ends[rank] = end
                self._ended.add(rank)


# --- further rounds ---------------------------------------------------------------------------------------------------


@dataclass
class LeaderRounds:
    """Decides after each round whether there is another, and calls the other hosts.

    Attributes:
        wait: Seconds that hosts have to come back; 0: a lost one ends the run.
        decision: Returns what other hosts have to know about an entry.
    """

    hosts: Hosts
    supervisor: Supervisor
    wait: float
    folder: Path
    decision: Callable[[Entry], Mapping[str, Any]]
    _failure: Failure | None = field(default=None, init=False)

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Entry | None:
        """Return the entry of the next round's ranks once its hosts are there; None: there is no other round."""
        hosts, cause = self.hosts, first_cause(ends)
        kind = None if cause is None else ends[cause].kind
        is_lost = kind is FailureKind.LOST
        if cause is not None and (ends[cause].left_by or (is_lost and not (self.wait or hosts.elastic))):
            return None
        is_paused = hosts.pauses and kind in _OF_PAUSE
        again = self.supervisor.after_pause() if is_paused else self.supervisor.next_entry(ends, result)
        if again is None:
            return None
        try:
            hosts.call(result, self.wait if is_lost and not hosts.elastic else max(self.wait, _READY_S))
            hosts.meet()
        except Failure as failure:
            self._failure = failure
            return None
        print_on_stderr(_of_round(hosts))
        hosts.open_folder(self.folder, self.decision(again))
        return again

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the run's result, of which this was the last round's."""
        if self._failure is None:
            return self.supervisor.concluded(result)
        text = f"{gist(result.text)}\n{message_of(self._failure)}"
        return LaunchResult(self._failure.kind, text, cut_off=isinstance(self._failure, Stopped))


@dataclass
class FollowerRounds:
    """Follows the leader's decision after each round.

    Attributes:
        wait: Seconds that the leader has to come back; 0: its loss ends the run.
    """

    hosts: Hosts
    wait: float
    entry: Callable[[Path, Mapping[str, Any]], Entry]
    _result: LaunchResult | None = field(default=None, init=False)

    def next_entry(self, ends: Sequence[End], result: LaunchResult) -> Entry | None:
        """Return the entry of the next round's ranks once its hosts are there; None: there is no other round."""
        hosts = self.hosts
        while hosts.state is LaunchState.CALLED or (hosts.state is LaunchState.CUT_OFF and self.wait):
            try:
                if folder := self._met(result):
                    print_on_stderr(_of_round(hosts))
                    return self.entry(folder, hosts.decision)
                self._result = LaunchResult(FailureKind.DONE)
            except Failure as failure:
                if hosts.state is not LaunchState.CUT_OFF:
                    self._result = LaunchResult.of(failure)
                    where = f" on host {hosts.name}" if isinstance(failure, Stopped) else ""
                    hosts.fail(self._result.kind, self._result.text + where)
        return None

    def concluded(self, result: LaunchResult) -> LaunchResult:
        """Return the run's result, of which this was the last round's."""
        return self._result or result

    def _met(self, result: LaunchResult) -> Path | None:
        """Return the run's folder once all hosts of the round are there; None: nothing is left to train."""
        hosts = self.hosts
        if hosts.state is LaunchState.CALLED:
            print_on_stderr(f"lockstep: {gist(result.text)}\nlockstep: all ranks start again")
            hosts.answer()
        else:
            why = "" if hosts.result is None else hosts.result.text
            wait = f"this host waits up to {self.wait:g} s (recovery.host_wait) for node 0"
            print_on_stderr(f"lockstep: {why}\nlockstep: {wait}")
            hosts.look_for_leader(self.wait)
        hosts.meet()
        return hosts.wait_for_folder()


def _of_round(hosts: Hosts) -> str:
    named = ", ".join(map(str, hosts.world))
    return f"lockstep: round {hosts.round} trains on {counted(len(hosts.world), 'host')}: {named}"
