"""The process of each launcher that connects its host with the others: it needs no torch, and is there before it.

    host a   launcher -- relay, which listens at the rendezvous --.-- store of rank 0, on loopback
                              |                                   |
    host b   launcher -- relay                      ranks -- a port on loopback, a connection each

All connections go to the leader's relay, and begin with a proof of the job's token (`host_protocol`). A message of one
launcher goes to all others. A host is lost when its connection ends, or when nothing has come from it for some seconds.
The relay ends with its launcher, and its connections with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

from lockstep.core.open_files import raise_open_file_limit
from lockstep.core.stopping import SAVE_SIGNAL, STOP_SIGNALS
from lockstep.launch.host_protocol import Link, Message, NotAuthorized, NotLauncher, store_of
from lockstep.launch.leading import Leader
from lockstep.launch.reaching import Rendezvous
from lockstep.launch.relaying import Relay, heartbeat
from lockstep.launch.splicing import StoreEnd, listen_for_ranks, taken_over

_LAST_WORDS_S = 5.0  # for the leader to read what this host has sent
_HANDSHAKES = 64  # that the ranks of a host make at the same time


# --- the other hosts --------------------------------------------------------------------------------------------------


class _Follower(Relay):
    """The relay of a host that connects to the leader's."""

    def __init__(self, launcher: Link, order: Message) -> None:
        super().__init__(launcher, order)
        self._link: Link | None = None
        self._ports: asyncio.Server | None = None
        self._connection = self.start(self._follow(self.timeout, self.limit))

    async def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                message = await self.launcher.receive()
                if message["type"] == "again":
                    self._connection.cancel()
                    self._leave()
                    self._connection = self.start(self._follow(message["wait"], "recovery.host_wait"))
                elif not self._connection.done() and self._link is not None:
                    self._link.send(message)
        if self._link is not None:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._link.writer.drain()
            self._link.close()
            with contextlib.suppress(OSError):
                await self._link.writer.wait_closed()

    def _leave(self) -> None:
        if self._link is not None:
            self._link.writer.transport.abort()
            self._link = None

    async def _follow(self, seconds: float, key: str) -> None:
        rendezvous = Rendezvous(self.address, self.place, self.key, seconds, key)
        try:
            link = self._link = await rendezvous.reach(self.note)
        except (NotAuthorized, NotLauncher, OSError) as error:
            failure = rendezvous.failure(error, self.hello["host"])
            self.launcher.send({"type": "result", **failure})
            return
        address = link.writer.get_extra_info("sockname")[0]
        link.send(self.hello)
        self.start(heartbeat(link))
        with_world = False
        try:
            while True:
                message = await link.receive(self.silence)
                if message["type"] == "world":
                    with_world = True
                    port = await self._forward(rendezvous, message["round"])
                    message |= {"port": port, "address": address}
                if message["type"] != "beat":
                    self.launcher.send(message)
        except OSError as error:
            lost = {"type": "lost", "node": 0, **self.why_lost(error)}
            if not with_world:
                lost["why"] += " before all hosts had come"
            self.launcher.send(lost)

    async def _forward(self, rendezvous: Rendezvous, number: int) -> int:
        """Listen on loopback for this host's ranks of a round, whose connections go to its store; return the port."""
        handshakes = asyncio.Semaphore(_HANDSHAKES)

        async def connect(near: StoreEnd) -> None:
            try:
                async with handshakes:
                    _, writer = await rendezvous.open(store_of(number))
            except (NotAuthorized, NotLauncher, OSError):
                near.close()
                return
            near.join(taken_over(writer))
            await near.is_over.wait()  # as long, `writer` must live

        if self._ports is not None:
            self._ports.close()

        def opened(near: StoreEnd) -> None:
            self.start(connect(near))

        self._ports = await listen_for_ranks(opened)
        return int(self._ports.sockets[0].getsockname()[1])


# --- the process ------------------------------------------------------------------------------------------------------


async def _run(channel: int, listener: int, parent: int) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=channel))
    launcher = Link(reader, writer)
    order = await launcher.receive()
    relay = loop.create_task(
        Leader(launcher, order).run(socket.socket(fileno=listener))
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
