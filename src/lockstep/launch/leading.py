"""The relay at the rendezvous: decides which hosts take part in a round, and passes messages on.

    round 1 meets --> runs --> the launcher ends it: "next" --> round 2 meets --> ... --> the launcher's "result"
                       |- a host comes: it waits, and the launcher gets "arrived" if the run can take it in
                       '- a host is lost: all get "lost"

Which launchers meet for a round, and when it begins, is arithmetic:

    round 1    a there, b there                    all are there: it begins
    round 2    a ready, b ready                    at once: no host is missing
    round 3    a ready, b lost, then there again   it begins when b has come; with MIN:MAX, seconds after b was lost
               a ready, c waits                    c takes the place of b
    round 4    b's copies differ a second time     b is left out, if those that stay are enough

A message belongs to the round that its host takes part in. The ranks' store is another one in each round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.nodes import node_range
from lockstep.launch.host_protocol import HOST, Link, Message, store_of
from lockstep.launch.relaying import Relay, connect_with_store, heartbeat, taken_over

_MAX_KEYS = 5  # settings shown in a message
_ONCE_TOO_OFTEN = 2  # rounds that a host's copies have ended: one may be chance, and the next is its memory or a device
T = TypeVar("T", bound=Mapping[str, Any])
_LAST_WORDS_S = 5.0  # for the other hosts to read how the run ended
_WAITING_S = 5.0  # after which missing hosts are noted
_REGROUP_S = 2.0  # that others have to come, too, once a host is lost
_BACKLOG = 1024  # connections that wait to be accepted: all ranks of a run connect at once


@dataclass
class Guest:
    """A launcher that is connected.

    Attributes:
        hello: What it has introduced itself with.
        ready: Whether it waits for the next round; otherwise its ranks of the last one may still run.
        node: Its node rank in the round that runs; None: it takes no part.
        has_trained: Whether it has taken part in a round.
        differed: Rounds that ended because its ranks held other copies of the training state than most.
    """

    hello: Mapping[str, Any]
    ready: bool = True
    node: int | None = None
    has_trained: bool = False
    differed: int = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """The time before a round.

    Attributes:
        least, most: Numbers of hosts with which it may begin.
        early: When it may begin with less than all (seconds, CLOCK_MONOTONIC).
    """

    least: int
    most: int
    early: float = math.inf

    def chosen(self, guests: Sequence[Guest], now: float) -> list[Guest]:
        """Return those with which the round begins now; none: it doesn't. The first one leads."""
        there: list[Guest] = []
        for guest in guests:
            rank = guest.hello["node_rank"]
            if guest.ready and (rank is None or all(rank != other.hello["node_rank"] for other in there)):
                there.append(guest)
        if len(there) >= self.most:
            return there[: self.most]
        all_ready = all(guest.ready for guest in guests)
        return there if len(there) >= self.least and all_ready and now >= self.early else []


def left_out(guests: Sequence[Guest], least: int) -> tuple[list[Guest], list[Guest]]:
    """Return the hosts that are left out because copies on them have differed too often, and those that are needed.

    Args:
        guests: All that are there. The first one leads, and stays.
        least: Number of hosts that have to stay.
    """
    suspects = [guest for guest in guests if guest.differed >= _ONCE_TOO_OFTEN]
    leaving = [guest for guest in suspects if guest is not guests[0]][: max(0, len(guests) - least)]
    return leaving, [guest for guest in suspects if all(guest is not other for other in leaving)]


def differed_text(guest: Guest) -> str:
    """Return the sentences about a host whose copies have differed too often."""
    return (
        f"copies of the training state on host {guest.hello['host']} have differed from most others' in "
        f"{guest.differed} rounds: look at its memory and devices."
    )


def refusal_of(hellos: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> str:
    """Return why a host can't join those that are there, the leader first; empty: it can.

    Args:
        new: `host`, `node_rank` (or None), `nodes` (or MIN:MAX), `versions` and `settings`, texts by name.
    """
    leader = hellos[0]
    if new["nodes"] != leader["nodes"]:
        return (
            f"host {new['host']} was started with --nodes {new['nodes']}, and host {leader['host']} with --nodes "
            f"{leader['nodes']}; give all hosts the same number"
        )
    for name, version in leader["versions"].items():
        if new["versions"].get(name) != version:
            other = new["versions"].get(name, "none")
            return (
                f"host {new['host']} has {name} {other}, and host {leader['host']} {version}; install the same version "
                "on all hosts"
            )
    names = {**leader["settings"], **new["settings"]}
    differing = [name for name in names if leader["settings"].get(name) != new["settings"].get(name)]
    if differing:
        more = f" and {len(differing) - _MAX_KEYS} more" if len(differing) > _MAX_KEYS else ""
        return (
            f"host {new['host']} was started with other settings than host {leader['host']}: "
            f"{', '.join(differing[:_MAX_KEYS])}{more}; give all hosts the same command and config"
        )
    for other in hellos:
        if new["node_rank"] is not None and other["node_rank"] == new["node_rank"]:
            return (
                f"hosts {other['host']} and {new['host']} both have --node-rank {new['node_rank']}; give each host a "
                "rank of its own, or leave the option out on all"
            )
    return ""


def in_places(hellos: Sequence[T]) -> list[T]:
    """Return the hosts by node rank: those with one in its place, the others in the order of their arrival.

    Where hosts are missing, the others move up.
    """
    places: dict[int, T] = {hello["node_rank"]: hello for hello in hellos if hello["node_rank"] is not None}
    free = iter(place for place in itertools.count() if place not in places)
    for hello in hellos:
        if hello["node_rank"] is None:
            places[next(free)] = hello
    return [places[place] for place in sorted(places)]


def waiting_text(hellos: Sequence[Mapping[str, Any]], address: str, limit: str) -> str:
    """Return the note about hosts that have not come yet."""
    came, missing = _came_and_missing(hellos)
    there = f"{len(hellos)} of {hellos[0]['nodes']} hosts are at {address}: {came}; missing: {missing}"
    return f"{there}. They are waited for up to {limit}"


def missing_text(hellos: Sequence[Mapping[str, Any]], address: str, limit: str) -> str:
    """Return the message about hosts that have not come."""
    came, missing = _came_and_missing(hellos)
    return (
        f"{len(hellos)} of {hellos[0]['nodes']} hosts reached {address} within {limit}: {came}; "
        f"missing: {missing}. Start the same command on each host, and let the hosts reach {address}"
    )


def _came_and_missing(hellos: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the names of the hosts that are there, and which are missing."""
    nodes = node_range(hellos[0]["nodes"])[1]
    came = ", ".join(str(hello["host"]) for hello in hellos)
    if any(hello["node_rank"] is not None for hello in hellos[1:]):
        absent = [str(place) for place in range(nodes) if place not in {hello["node_rank"] for hello in hellos}]
        missing = f"node rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
    else:
        missing = f"{nodes - len(hellos)} more"
    return came, missing


class Leader(Relay):
    """The relay of the host that leads."""

    def __init__(self, launcher: Link, order: Message) -> None:
        super().__init__(launcher, order)
        self._guests: dict[Link | None, Guest] = {None: Guest(self.hello)}  # None: this host
        self._least, self._most = node_range(self.hello["nodes"])
        self._join_wait: float = order["join_wait"]
        self._round: int = order.get("round", 1)
        self._meeting: Meeting | None = None  # none: the round runs
        self._waiting: asyncio.Task[None] | None = None
        self._concluded = False  # the launcher here is to end the run
        self._over: Message | None = None
        self._store: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, listener: socket.socket) -> None:
        await asyncio.start_server(self._connected, sock=listener, backlog=_BACKLOG)
        self._meet(self.timeout, self.limit, self._join_wait)
        with contextlib.suppress(OSError):
            while True:
                message = await self.launcher.receive()
                if message["type"] == "store":
                    self._store.set_result(message["port"])
                elif message["type"] == "next":
                    self._end_round(message)
                elif message["type"] == "result":
                    self._end(message)
                else:
                    self._send({**message, "node": 0}, but=None)
        if self._over is not None:
            until = time.monotonic() + _LAST_WORDS_S
            while len(self._guests) > 1 and time.monotonic() < until:
                await asyncio.sleep(0.01)

    # --- rounds ---

    def _meet(self, seconds: float, key: str, early: float) -> None:
        """Begin a round as soon as its hosts are there.

        Args:
            seconds: To wait for them, as the config's `key` has it.
            early: Seconds after which fewer than all suffice, if the run may have fewer.
        """
        now = time.monotonic()
        elastic = self._least < self._most
        self._meeting = Meeting(self._least, self._most, now + min(early, seconds) if elastic else math.inf)
        if not self._try_to_begin():
            self._waiting = self.start(self._wait_for_hosts(seconds, f"{seconds:g} s ({key})"))
            if elastic:
                asyncio.get_running_loop().call_at(self._meeting.early, self._try_to_begin)

    async def _wait_for_hosts(self, seconds: float, limit: str) -> None:
        until = time.monotonic() + seconds
        await asyncio.sleep(min(_WAITING_S, seconds))
        if seconds > _WAITING_S:
            text = waiting_text(self._there(), self.place, limit)
            self._note_everywhere(text)
        await asyncio.sleep(until - time.monotonic())
        self._conclude(FailureKind.FAILED.name, missing_text(self._there(), self.place, limit))

    def _conclude(self, kind: str, text: str) -> None:
        """Let the launcher here end the run, and report the result."""
        if not self._concluded and self._over is None:
            self._concluded = True
            self.launcher.send({"type": "result", "kind": kind, "text": text})

    def _there(self) -> list[Message]:
        return [dict(guest.hello) for guest in self._guests.values()]

    def _try_to_begin(self) -> bool:
        """Begin the round if its hosts are there: hand out node ranks; return whether it runs."""
        if self._meeting is None or self._concluded or self._over is not None:
            return False
        chosen = self._meeting.chosen([*self._guests.values()], time.monotonic())
        if not chosen:
            return False
        self._meeting = None
        if self._waiting is not None:
            self._waiting.cancel()
        places = in_places([guest.hello for guest in chosen])
        world = {
            "type": "world",
            "round": self._round,
            "hosts": [{name: hello.get(name) for name in ("host", "ranks")} for hello in places],
        }
        address = self.address[0]
        for link, guest in self._guests.items():
            if not any(guest is other for other in chosen):
                continue
            node = next(place for place, hello in enumerate(places) if hello is guest.hello)
            guest.node, guest.has_trained = node, True
            if link is not None:
                address = link.writer.get_extra_info("sockname")[0]  # at which the others have reached this host
                link.send({**world, "node": node})
        self.launcher.send({**world, "node": 0, "address": address})
        return True

    def _end_round(self, message: Message) -> None:
        """Let the hosts of a round meet for the next one; the launcher here is ready for it."""
        for link, guest in [*self._guests.items()]:
            if link is not None and guest.node in message["lost"]:
                del self._guests[link]  # its launcher hangs
                link.close()
        self._leave_out(message["differing"])
        for link, guest in self._guests.items():
            if link is not None and guest.node is not None:
                guest.ready = False
                link.send(message)
            guest.node = None
        self._round = message["round"]
        self._store.cancel()
        self._store = asyncio.get_running_loop().create_future()
        self._meet(message["wait"], "recovery.host_wait", _REGROUP_S if message["lost"] else 0.0)

    def _leave_out(self, nodes: Sequence[int]) -> None:
        """Continue without a host whose ranks hold other copies than most again; `nodes` did in this round."""
        for guest in self._guests.values():
            guest.differed += guest.node in nodes
        leaving, staying = left_out([*self._guests.values()], self._least)
        for link, guest in [*self._guests.items()]:
            if link is not None and any(guest is other for other in leaving):
                del self._guests[link]
                text = f"{differed_text(guest)} It is left out"
                link.send(
                    {
                        "type": "result",
                        "kind": FailureKind.FAILED.name,
                        "text": f"{text}; the same command here lets it join again",
                    }
                )
                self._note_everywhere(f"{text}, and the others train on")
        for guest in staying:
            self._note_everywhere(f"{differed_text(guest)} The run needs it: start it on other hosts")

    def _note_everywhere(self, text: str) -> None:
        self._send({"type": "note", "text": text}, but=None, to_all=True)
        self.note(text)

    # --- connections ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wants = await self.doorkeeper.welcome(reader, writer)
            if wants == store_of(self._round):
                near = taken_over(writer)
                await connect_with_store(near, await asyncio.shield(self._store))
            elif wants == HOST:
                await self._serve(Link(reader, writer))
        except asyncio.CancelledError:  # the store's round is over
            pass
        finally:
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

    # --- hosts ---

    async def _serve(self, link: Link) -> None:
        try:
            hello = await link.receive(self.silence)
            if not self._admit(link, hello):
                return
            self.start(heartbeat(link))
            while True:
                self._pass_on(link, await link.receive(self.silence))
        except OSError as error:
            self._lose(link, self.why_lost(error))

    def _admit(self, link: Link, hello: Message) -> bool:
        """Let a host wait for a round, and begin it if it was the last that was missing; False: it is refused."""
        self._drop_earlier(hello)
        if self._over is not None:
            link.send(self._over)
            return False
        hosts = self._there()
        if not self.recovers and (self._meeting is None or len(hosts) == self._most):
            names = ", ".join(str(host["host"]) for host in hosts)
            text = f"host {hello['host']} is one too many: all {len(hosts)} hosts are there: {names}"
            link.send({"type": "result", "kind": FailureKind.CONFIG.name, "text": text})
            return False
        is_first = self._round == 1 and self._meeting is not None
        refusal = refusal_of(hosts if is_first else hosts[:1], hello)
        if refusal and not is_first:  # the others train
            link.send({"type": "result", "kind": FailureKind.CONFIG.name, "text": refusal})
            return False
        self._guests[link] = Guest(hello)
        if refusal:
            self._end({"type": "result", "kind": FailureKind.CONFIG.name, "text": refusal})
        elif not self._try_to_begin() and self._meeting is None:
            self._let_wait(link, hello)
        return True

    def _let_wait(self, link: Link, hello: Message) -> None:
        """Let a host that has come while the round runs wait for the next one."""
        trains = sum(guest.node is not None for guest in self._guests.values())
        if trains < self._most:
            self.launcher.send({"type": "arrived", "round": self._round, "host": hello["host"]})
            return
        text = f"{trains} hosts train already; this one waits, and takes the place of one that is lost"
        link.send({"type": "note", "text": text})

    def _drop_earlier(self, hello: Message) -> None:
        """Lose the earlier connection of a launcher that was cut off, or of a host whose launcher was started again."""
        for link, guest in [*self._guests.items()]:
            same = guest.hello["launcher"] == hello["launcher"]
            again = hello["node_rank"] is not None and all(
                guest.hello[key] == hello[key] for key in ("host", "node_rank")
            )
            if link is not None and (same or (again and self.recovers and guest.has_trained)):
                self._lose(link, {"why": "it has connected again"})
                link.close()

    def _pass_on(self, link: Link, message: Message) -> None:
        guest = self._guests.get(link)
        if guest is None or message["type"] == "beat":
            return
        if message["type"] == "ready":
            guest.ready = message["round"] == self._round
            self._try_to_begin()
        elif guest.node is not None and message.get("round") == self._round:
            self._send({**message, "node": guest.node}, but=link)
            self.launcher.send({**message, "node": guest.node})
        elif message["type"] == "gone" and self._meeting is not None:
            self._let_go(guest, message)

    def _let_go(self, guest: Guest, message: Message) -> None:
        """Take note that a host leaves while hosts meet; a further round waits for another in its place."""
        if self._round == 1 or (guest.has_trained and FailureKind[message["kind"]].is_stop):
            self._conclude(message["kind"], message["text"])
        elif self._over is None:
            self._note_everywhere(f"host {guest.hello['host']} leaves the run: {message['text']}")

    def _lose(self, link: Link, why: Message) -> None:
        guest = self._guests.pop(link, None)
        if guest is None or self._over is not None:
            return
        if guest.node is not None:
            lost = {"type": "lost", "round": self._round, "node": guest.node, **why}
            self._send(lost, but=link)
            self.launcher.send(lost)
        self._try_to_begin()

    def _end(self, result: Message) -> None:
        if self._over is None:
            self._over = result
            self._send(result, but=None, to_all=True)
            self.launcher.send(result)

    def _send(self, message: Message, but: Link | None, *, to_all: bool = False) -> None:
        """Send to the other hosts that train, or to all that are connected."""
        for link, guest in self._guests.items():
            if link is not None and link is not but and (to_all or guest.node is not None):
                link.send(message)
