"""The proxy at the rendezvous: decides which hosts take part in a round, and passes messages on.

    MEETING --> RUNNING --> the launcher calls "next" --> MEETING --> ... --> the launcher's "result" --> OVER
       |           |- a host comes: it waits, and the launcher gets "arrived" if the run can take it in
       |           '- a host is lost: all get "lost"
       '- hosts are missing in the end, or one leaves: the launcher gets a "result" --> ENDING --> OVER

A lost host may come back, or another that waits takes its place; with MIN:MAX the round begins without it after some
seconds. The ranks' store is another one in each round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import listed
from lockstep.core.nodes import node_range
from lockstep.launch.channel import HOST, LOOPBACK, Doorkeeper, Link, Message, Proxy, Streams, join, store_of

_MAX_KEYS = 5  # settings shown in a message
_LAST_WORDS_S = 5.0  # for the other hosts to read how the run ended
_WAITING_S = 5.0  # until missing hosts are noted
_REGROUP_S = 2.0  # that others have to come, too, once a host is lost
_BACKLOG = 1024  # connections that wait to be accepted: all ranks of a run connect at once


class RoundState(Enum):
    """States of a round."""

    MEETING = auto()
    RUNNING = auto()
    ENDING = auto()
    OVER = auto()


@dataclass(eq=False)
class Member:
    """A launcher that is connected.

    Attributes:
        link: None: it is the launcher here, which leads.
        ready: Whether it waits for the next round; otherwise its ranks of the last one may still run.
        node: Its node rank in the round that runs; None: it takes no part.
    """

    hello: Mapping[str, Any]
    link: Link | None = None
    ready: bool = True
    node: int | None = None
    has_trained: bool = False

    @property
    def rank(self) -> int | None:
        """The node rank that it was given; None: any."""
        return cast("int | None", self.hello["node_rank"])


def chosen(members: Sequence[Member], least: int, most: int) -> list[Member]:
    """Return the hosts that a round of `least` to `most` begins with now, by node rank; none: it doesn't.

    Those with a node rank have its place, the others follow as they have come. Where hosts are missing, others move up.
    """
    there: list[Member] = []
    for member in members:
        if member.ready and (member.rank is None or all(member.rank != other.rank for other in there)):
            there.append(member)
    if len(there) < most and (len(there) < least or not all(member.ready for member in members)):
        return []
    taken = {member.rank for member in there[:most]}
    free = iter(place for place in itertools.count() if place not in taken)
    return sorted(there[:most], key=lambda member: next(free) if member.rank is None else member.rank)


def refusal_of(hellos: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> str:
    """Return why a host can't join the present ones, the leader first; empty: it can."""
    leader = hellos[0]
    here = {"--nodes": leader["nodes"], **leader["versions"], **leader["settings"]}
    there = {"--nodes": new["nodes"], **new["versions"], **new["settings"]}
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if names:
        with_values = ("--nodes", *leader["versions"])
        values = {name: f"{name} ({there.get(name)}, not {here.get(name)})" for name in with_values}
        what = listed([values.get(name, name) for name in names], _MAX_KEYS)
        remedy = "give all hosts the same command, config and versions"
        return f"host {new['host']} differs from host {leader['host']} in {what}; {remedy}"
    for other in hellos:
        if new["node_rank"] is not None and other["node_rank"] == new["node_rank"]:
            both = f"hosts {other['host']} and {new['host']} both have --node-rank {new['node_rank']}"
            return f"{both}; give each host a rank of its own, or leave the option out on all"
    return ""


def who_is_there(hellos: Sequence[Mapping[str, Any]], nodes: int) -> str:
    """Return which of a number of hosts have come, and which are missing."""
    missing = f"{nodes - len(hellos)} more"
    if any(hello["node_rank"] is not None for hello in hellos[1:]):
        absent = {*range(nodes)} - {hello["node_rank"] for hello in hellos}
        missing = f"node rank {', '.join(map(str, sorted(absent)))}"
    return f"{', '.join(hello['host'] for hello in hellos)}; missing: {missing}"


class Leader(Proxy):
    """The proxy of the host that leads."""

    def __init__(self, launcher: Link, order: Message) -> None:
        super().__init__(launcher, order)
        self._state = RoundState.MEETING
        self._round = 1
        self._recovers: bool = order["recovers"]
        self._members = [Member(self.hello)]  # the first one leads
        self._least, self._most = node_range(self.hello["nodes"])
        self._suffice = self._most  # hosts that the round may begin with now
        self._timers: list[asyncio.TimerHandle] = []
        self._result: Message | None = None
        self._store: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._doorkeeper = Doorkeeper(self.key, self.note)
        self._join_wait: float = order["join_wait"]

    async def run(self, listener: socket.socket) -> None:
        await asyncio.start_server(self._connected, sock=listener, backlog=_BACKLOG)
        self._meet(self.timeout, "launch.timeout", self._join_wait)
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
                    self._send_training({**message, "node": 0})
        if self._state is RoundState.OVER:
            until = time.monotonic() + _LAST_WORDS_S
            while len(self._members) > 1 and time.monotonic() < until:
                await asyncio.sleep(0.01)

    # --- rounds ---

    def _meet(self, seconds: float, key: str, early: float) -> None:
        """Begin a round as soon as its hosts are there, for up to `seconds`; after `early` seconds with fewer."""
        self._state, self._suffice = RoundState.MEETING, self._most
        limit, loop = f"{seconds:g} s ({key})", asyncio.get_running_loop()
        self._timers = [loop.call_later(seconds, self._give_up, limit), loop.call_later(early, self._settle_for_fewer)]
        if seconds > _WAITING_S:
            self._timers.append(loop.call_later(_WAITING_S, self._note_missing, limit))
        self._try_to_begin()

    def _settle_for_fewer(self) -> None:
        self._suffice = self._least
        self._try_to_begin()

    def _counted(self, what: str) -> str:
        number = f"{len(self._members)} of {self.hello['nodes']} hosts {what}"
        return f"{number}: {who_is_there(self._hellos(), self._most)}"

    def _note_missing(self, limit: str) -> None:
        self._note_everywhere(f"{self._counted(f'are at {self.place}')}. They are waited for up to {limit}")

    def _give_up(self, limit: str) -> None:
        self._settle_for_fewer()
        if self._state is not RoundState.MEETING:
            return
        remedy = f"Start the same command on each host, and let the hosts reach {self.place}"
        text = self._counted(f"reached {self.place} within {limit}")
        self._let_launcher_end(FailureKind.FAILED.name, f"{text}. {remedy}")

    def _let_launcher_end(self, kind: str, text: str) -> None:
        self._state = RoundState.ENDING
        self._stop_timers()
        self.launcher.send({"type": "result", "kind": kind, "text": text})

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _hellos(self) -> list[Mapping[str, Any]]:
        return [member.hello for member in self._members]

    def _try_to_begin(self) -> None:
        if self._state is not RoundState.MEETING:
            return
        hosts = chosen(self._members, self._suffice, self._most)
        if not hosts:
            return
        self._state = RoundState.RUNNING
        self._stop_timers()
        named = [{"host": member.hello["host"], "ranks": member.hello["ranks"]} for member in hosts]
        address = self.address[0]
        for node, member in reversed([*enumerate(hosts)]):
            member.node, member.has_trained = node, True
            if member.link is not None:
                address = member.link.writer.get_extra_info("sockname")[0]  # where others have reached this host
            link = member.link or self.launcher
            link.send({"type": "world", "round": self._round, "hosts": named, "node": node, "address": address})

    def _end_round(self, message: Message) -> None:
        """Let the hosts of a round meet for the next one; the launcher here is ready for it."""
        for member in [*self._members]:
            if member.link is not None and member.node in message["lost"]:  # its launcher hangs
                self._members.remove(member)
                member.link.writer.close()
            elif member.link is not None and member.node is not None:
                member.ready = False
                member.link.send(message)
            member.node = None
        self._round = message["round"]
        self._store.cancel()
        self._store = asyncio.get_running_loop().create_future()
        self._meet(message["wait"], "recovery.host_wait", _REGROUP_S if message["lost"] else 0.0)

    # --- connections ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wants = await self._doorkeeper.welcome((reader, writer))
            if wants == HOST:
                await self._serve(Link((reader, writer)))
            elif wants == store_of(self._round):
                await self._connect_with_store((reader, writer))
        finally:
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

    async def _connect_with_store(self, rank: Streams) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):  # rank 0 has ended, the store's round is over
            port = await asyncio.shield(self._store)
            await join(rank, await asyncio.open_connection(LOOPBACK, port))

    async def _serve(self, link: Link) -> None:
        member = None
        try:
            member = self._admitted(link, await link.receive(self.silence))
            if member is None:
                return
            self.start(link.beat())
            while True:
                self._pass_on(member, await link.receive(self.silence))
        except OSError as error:
            if member is not None:
                self._lose(member, self.why_lost(error))

    def _admitted(self, link: Link, hello: Message) -> Member | None:
        """Let a host wait for a round, and begin it if it was the last that was missing; None: it is refused."""
        member, hellos = Member(hello, link), self._hellos()
        is_first = self._round == 1 and self._state is RoundState.MEETING
        refusal = refusal_of(hellos if is_first else hellos[:1], hello)
        if not self._recovers and (self._state is RoundState.RUNNING or len(hellos) == self._most):
            names = ", ".join(each["host"] for each in hellos)
            refusal = f"host {hello['host']} is one too many: all {len(hellos)} hosts are there: {names}"
            is_first = False
        result = {"type": "result", "kind": FailureKind.CONFIG.name, "text": refusal}
        if self._state is RoundState.OVER or (refusal and not is_first):
            link.send(self._result or result)  # the others train
            return None
        self._members.append(member)
        trains = sum(other.node is not None for other in self._members)
        if refusal:
            self._end(result)
        elif self._state is RoundState.MEETING:
            self._try_to_begin()
        elif trains < self._most:
            self.launcher.send({"type": "arrived", "round": self._round, "host": hello["host"]})
        else:
            text = f"{trains} hosts train already; this one waits as a spare, and replaces a lost host"
            link.send({"type": "note", "text": text})
        return member

    def _pass_on(self, member: Member, message: Message) -> None:
        if member not in self._members or message["type"] == "beat":
            return
        if message["type"] == "ready":
            member.ready = message["round"] == self._round
            self._try_to_begin()
        elif member.node is not None and message.get("round") == self._round:
            passed = {**message, "node": member.node}
            self._send_training(passed, but=member)
            self.launcher.send(passed)
        elif message["type"] == "gone" and self._state is RoundState.MEETING:
            # it leaves: a further round waits for another in its place
            if self._round == 1 or (member.has_trained and FailureKind[message["kind"]].is_stop):
                self._let_launcher_end(message["kind"], message["text"])
            else:
                self._note_everywhere(f"host {member.hello['host']} leaves the run: {message['text']}")

    def _lose(self, member: Member, why: str) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        if member.node is not None and self._state is not RoundState.OVER:
            lost = {"type": "lost", "round": self._round, "node": member.node, "why": why}
            self._send_training(lost)
            self.launcher.send(lost)
        self._try_to_begin()

    def _end(self, result: Message) -> None:
        if self._state is not RoundState.OVER:
            self._state, self._result = RoundState.OVER, result
            self._stop_timers()
            self._send(result, self._members)
            self.launcher.send(result)

    def _note_everywhere(self, text: str) -> None:
        self._send({"type": "note", "text": text}, self._members)
        self.note(text)

    def _send_training(self, message: Message, but: Member | None = None) -> None:
        self._send(message, [each for each in self._members if each.node is not None and each is not but])

    def _send(self, message: Message, members: Sequence[Member]) -> None:
        for member in members:
            if member.link is not None:
                member.link.send(message)
