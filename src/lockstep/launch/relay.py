"""The process of each launcher that connects its host with the others: it needs no torch, and is there before it.

    host a   launcher -- relay, which listens at the rendezvous --.-- store of rank 0, on loopback
                              |                                   |
    host b   launcher -- relay                      ranks -- a port on loopback, a connection each

All connections go to the leader's relay, and all begin with a proof of the job's token (`host_protocol`). A message of
one launcher goes to all others. A host is lost when its connection ends, or when nothing has come from it for some
seconds. The relay ends with its launcher, and its connections with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from typing import Any

from lockstep.core.open_files import raise_open_file_limit
from lockstep.core.stopping import SAVE_SIGNAL, STOP_SIGNALS
from lockstep.launch.host_protocol import (
    HEARTBEAT_S,
    HOST,
    SILENCE_S,
    STORE,
    Link,
    Message,
    NotAuthorized,
    NotLauncher,
    in_places,
    missing_text,
    refusal_of,
    waiting_text,
    welcome,
)
from lockstep.launch.reaching import Rendezvous
from lockstep.launch.splicing import StoreEnd, connect_with_store, listen_for_ranks, taken_over

_LAST_WORDS_S = 5.0  # for the other hosts to read how the run ended
_WAITING_S = 5.0  # after which missing hosts are noted
_BACKLOG = 1024  # connections that wait to be accepted: all ranks of a run connect at once
_HANDSHAKES = 64  # that the ranks of a host make at the same time
_UNPROVEN, _UNPROVEN_OF_HOST = 4096, 1024  # connections without a proof of the token, of all and of an address
_REFUSALS = 16  # addresses that are reported
_CONFIG_ERROR, _FAILED = 2, 1  # exit codes

_BEAT: Message = {"type": "beat"}


async def _heartbeat(link: Link) -> None:
    while True:
        link.send(_BEAT)
        await asyncio.sleep(HEARTBEAT_S)


def _why_lost(error: OSError) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return f"nothing has come from it for {SILENCE_S:g} s"
    return "its connection was closed"


def _address(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]).removeprefix("::ffff:") if peer else "unknown"


class _Relay:
    """The common part of both kinds: the launcher, and tasks that end with the relay."""

    def __init__(self, launcher: Link, order: Message) -> None:
        self.launcher = launcher
        self.key = bytes.fromhex(order["key"])
        self.hello: Message = order["hello"]
        self.timeout: float = order["timeout"]
        self.address: tuple[str, int] = (order["address"][0], order["address"][1])
        self.place = f"{order['name']}:{order['address'][1]}"
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note(self, text: str) -> None:
        self.launcher.send({"type": "note", "text": text})


# --- the leader -------------------------------------------------------------------------------------------------------


class _Leader(_Relay):
    """The relay at the rendezvous: decides who takes part, and passes messages on."""

    def __init__(self, launcher: Link, order: Message) -> None:
        super().__init__(launcher, order)
        self._hellos: dict[Link | None, Message] = {None: self.hello}  # None: this host
        self._nodes: dict[Link, int] = {}  # node ranks, once all are there
        self._over: Message | None = None
        self._store = asyncio.get_running_loop().create_future()
        self._refused: set[str] = set()
        self._unproven: dict[asyncio.StreamWriter, str] = {}  # the oldest first

    async def run(self, listener: socket.socket) -> None:
        await asyncio.start_server(self._connected, sock=listener, backlog=_BACKLOG)
        self.start(self._wait_for_hosts())
        if self.hello["nodes"] == 1:
            self._begin()
        with contextlib.suppress(OSError):
            while True:
                message = await self.launcher.receive()
                if message["type"] == "store":
                    self._store.set_result(message["port"])
                elif message["type"] == "result":
                    self._end(message)
                else:
                    self._send({**message, "node": 0}, but=None)
        if self._over is not None:
            until = time.monotonic() + _LAST_WORDS_S
            while len(self._hellos) > 1 and time.monotonic() < until:
                await asyncio.sleep(0.01)

    async def _wait_for_hosts(self) -> None:
        await asyncio.sleep(min(_WAITING_S, self.timeout))
        if not self._nodes and self._over is None and self.timeout > _WAITING_S:
            text = waiting_text([*self._hellos.values()], self.place, self.timeout)
            self._send({"type": "note", "text": text}, but=None)
            self._note(text)
        await asyncio.sleep(self.timeout - min(_WAITING_S, self.timeout))
        if not self._nodes and self._over is None:
            text = missing_text([*self._hellos.values()], self.place, self.timeout)
            self._end({"type": "result", "code": _FAILED, "text": text})

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._limit_unproven(writer)
        try:
            wants = await welcome(reader, writer, self.key)
            self._unproven.pop(writer, None)
            if wants == STORE:
                near = taken_over(writer)
                await connect_with_store(near, await self._store)
            elif wants == HOST:
                await self._serve(Link(reader, writer))
        except (NotAuthorized, NotLauncher) as error:
            self._note_refusal(_address(writer), error)
        finally:
            self._unproven.pop(writer, None)
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

    def _limit_unproven(self, writer: asyncio.StreamWriter) -> None:
        """Note a connection, and end the oldest of those whose address holds too many without a proof."""
        self._unproven[writer] = _address(writer)
        same = [other for other, address in self._unproven.items() if address == _address(writer)]
        if len(same) > _UNPROVEN_OF_HOST or len(self._unproven) > _UNPROVEN:
            oldest = same[0] if len(same) > _UNPROVEN_OF_HOST else next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()

    def _note_refusal(self, host: str, error: Exception) -> None:
        if host not in self._refused and len(self._refused) < _REFUSALS:
            self._refused.add(host)
            reason = "has another job token" if isinstance(error, NotAuthorized) else "isn't a launcher of Lockstep"
            self._note(f"a connection from {host} was refused: it {reason}")

    async def _serve(self, link: Link) -> None:
        try:
            hello = await link.receive(SILENCE_S)
            if not self._admit(link, hello):
                return
            self.start(_heartbeat(link))
            while True:
                self._pass_on(link, await link.receive(SILENCE_S))
        except OSError as error:
            self._lose(link, _why_lost(error))

    def _admit(self, link: Link, hello: Message) -> bool:
        if self._over is not None:
            link.send(self._over)
            return False
        hosts = [*self._hellos.values()]
        if self._nodes or len(hosts) == self.hello["nodes"]:
            names = ", ".join(str(host["host"]) for host in hosts)
            text = f"host {hello['host']} is one too many: all {len(hosts)} hosts are there: {names}"
            link.send({"type": "result", "code": _CONFIG_ERROR, "text": text})
            return False
        refusal = refusal_of(hosts, hello)
        self._hellos[link] = hello
        if refusal:
            self._end({"type": "result", "code": _CONFIG_ERROR, "text": refusal})
        elif len(self._hellos) == self.hello["nodes"]:
            self._begin()
        return True

    def _begin(self) -> None:
        """Hand out node ranks: all hosts are there."""
        places = in_places([*self._hellos.values()])
        hosts = [{"host": hello["host"], "ranks": hello["ranks"]} for hello in places]
        address = self.address[0]
        for link, hello in self._hellos.items():
            node = next(place for place, other in enumerate(places) if other is hello)
            if link is not None:
                self._nodes[link] = node
                address = link.writer.get_extra_info("sockname")[0]  # at which the others have reached this host
                link.send({"type": "world", "node": node, "hosts": hosts})
        self.launcher.send({"type": "world", "node": 0, "hosts": hosts, "address": address})

    def _pass_on(self, link: Link, message: Message) -> None:
        if message["type"] == "beat":
            return
        if link in self._nodes:
            self._send({**message, "node": self._nodes[link]}, but=link)
            self.launcher.send({**message, "node": self._nodes[link]})
        elif message["type"] == "gone":  # before all were there
            self._end({"type": "result", "code": message["code"], "text": message["text"]})

    def _lose(self, link: Link, why: str) -> None:
        self._hellos.pop(link, None)
        node = self._nodes.pop(link, None)
        if node is not None and self._over is None:
            lost = {"type": "lost", "node": node, "why": why}
            self._send(lost, but=link)
            self.launcher.send(lost)

    def _end(self, result: Message) -> None:
        if self._over is None:
            self._over = result
            self._send(result, but=None)
            self.launcher.send(result)

    def _send(self, message: Message, but: Link | None) -> None:
        for link in self._hellos:
            if link is not None and link is not but:
                link.send(message)


# --- the other hosts --------------------------------------------------------------------------------------------------


class _Follower(_Relay):
    """The relay of a host that connects to the leader's."""

    def __init__(self, launcher: Link, order: Message) -> None:
        super().__init__(launcher, order)
        self._rendezvous = Rendezvous(self.address, self.place, self.key, self.timeout)

    async def run(self) -> None:
        connection = asyncio.get_running_loop().create_task(self._follow())
        with contextlib.suppress(OSError):
            while True:
                message = await self.launcher.receive()
                if not connection.done() and self._link is not None:
                    self._link.send(message)
        if self._link is not None:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._link.writer.drain()
            self._link.close()
            with contextlib.suppress(OSError):
                await self._link.writer.wait_closed()

    _link: Link | None = None

    async def _follow(self) -> None:
        try:
            link = self._link = await self._rendezvous.reach(self._note)
        except (NotAuthorized, NotLauncher, OSError) as error:
            failure = self._rendezvous.failure(error, self.hello["host"])
            self.launcher.send({"type": "result", **failure})
            return
        link.send(self.hello)
        self.start(_heartbeat(link))
        with_world = False
        try:
            while True:
                message = await link.receive(SILENCE_S)
                if message["type"] == "world":
                    with_world = True
                    message |= {"port": await self._forward(), "address": link.writer.get_extra_info("sockname")[0]}
                if message["type"] != "beat":
                    self.launcher.send(message)
        except OSError as error:
            why = _why_lost(error) if with_world else f"{_why_lost(error)} before all hosts had come"
            self.launcher.send({"type": "lost", "node": 0, "why": why})

    async def _forward(self) -> int:
        """Listen on loopback for this host's ranks, whose connections go to the store; return the port."""
        handshakes = asyncio.Semaphore(_HANDSHAKES)

        async def connect(near: StoreEnd) -> None:
            try:
                async with handshakes:
                    _, writer = await self._rendezvous.open(STORE)
            except (NotAuthorized, NotLauncher, OSError):
                near.close()
                return
            near.join(taken_over(writer))
            await near.is_over.wait()  # as long, `writer` must live

        return await listen_for_ranks(lambda near: self.start(connect(near)))


# --- the process ------------------------------------------------------------------------------------------------------


async def _run(channel: int, listener: int, parent: int) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=channel))
    launcher = Link(reader, writer)
    order = await launcher.receive()
    relay = loop.create_task(
        _Leader(launcher, order).run(socket.socket(fileno=listener))
        if listener >= 0
        else _Follower(launcher, order).run()
    )
    with contextlib.suppress(ProcessLookupError):  # its ranks have copies of the channel, which may stay open longer
        handle = os.pidfd_open(parent)

        def end() -> None:
            loop.remove_reader(handle)
            reader.feed_eof()

        loop.add_reader(handle, end)
        await relay


def main(channel: int, listener: int, parent: int) -> None:
    """Run a relay until its launcher closes the channel, or ends.

    Args:
        channel: Descriptor of the socket to the launcher.
        listener: Descriptor of the socket at the rendezvous; -1: another host listens there.
        parent: The launcher's process id.
    """
    for number in (*STOP_SIGNALS, SAVE_SIGNAL):  # the launcher handles them
        signal.signal(number, signal.SIG_IGN)
    raise_open_file_limit()
    with contextlib.suppress(OSError):
        asyncio.new_event_loop().run_until_complete(_run(channel, listener, parent))
    sys.stderr.flush()
    os._exit(0)  # connections that are open end with the process
