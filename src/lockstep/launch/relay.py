"""The process of each launcher that connects its host with the others: it needs no torch, and is there before it.

    host a   launcher -- relay, which listens at the rendezvous --.-- store of rank 0, on loopback
                              |                                   |
    host b   launcher -- relay                      ranks -- a port on loopback, a connection each

All connections go to the leader's relay, and begin with a proof of the job's token (`host_protocol`). A message of one
launcher goes to all others. A host is lost when its connection ends, or when nothing has come from it for some seconds.
A name server may learn a name later (Kubernetes), and another host's launcher may start later: what can't be reached is
tried again until the time is over. The relay ends with its launcher, and its connections with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.process_settings import raise_open_file_limit
from lockstep.core.stopping import SAVE_SIGNAL, STOP_SIGNALS
from lockstep.launch.host_protocol import HOST, Link, Message, NotAuthorized, NotLauncher, introduce, store_of
from lockstep.launch.leading import Leader
from lockstep.launch.relaying import Relay, StoreEnd, heartbeat, listen_for_ranks, taken_over

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0  # between two attempts
_CONNECT_S = 5.0
_NOTED_S = 0.5  # after which the reason why it isn't reached yet is noted, and each further reason
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_LAST_WORDS_S = 5.0  # for the leader to read what this host has sent
_HANDSHAKES = 64  # that the ranks of a host make at the same time


class Rendezvous:
    """The leader's address, as another host sees it.

    Args:
        address: Its host and port.
        place: The same, as the user gave it.
        key: The proof's.
        timeout: Seconds to try.
        setting: The key of the config that has them.
    """

    def __init__(self, address: tuple[str, int], place: str, key: bytes, timeout: float, setting: str) -> None:
        self._host, self._port = address
        self._place = place
        self._key = key
        self._timeout = timeout
        self._limit = f"{timeout:g} s ({setting})"
        self._stage = self._reason = self._remedy = ""

    async def reach(self, note: Callable[[str], None]) -> Link:
        """Connect to the leader, and try again until the time is over.

        Args:
            note: Called with the reason why it isn't reached yet, and again with each other reason.

        Raises:
            NotAuthorized: One side doesn't know the other's token.
            NotLauncher: Another program listens there.
            OSError: It isn't reached.
        """
        until, pause = time.monotonic() + self._timeout, _FIRST_PAUSE_S
        reporting = asyncio.get_running_loop().create_task(self._report(note))
        try:
            while True:
                try:
                    async with asyncio.timeout(until - time.monotonic()):
                        return Link(*await self.open(HOST))
                except OSError as error:
                    if time.monotonic() < until or not self._reason:  # else an attempt was cut short
                        self._understand(error)
                    if time.monotonic() + pause >= until:
                        raise
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE_S)
        finally:
            reporting.cancel()

    async def open(self, wants: bytes) -> Streams:
        """Connect to the leader once, with proofs of the token. Raises as `reach` does."""
        reader, writer = await self._connect()
        self._stage = (
            f"what listens on {self._place} accepts connections, but hasn't answered as a launcher of Lockstep"
        )
        try:
            await introduce(reader, writer, self._key, wants)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def failure(self, error: Exception, host: str) -> Message:
        """Return the kind and the text of the result if this host, of that name, has not reached the leader."""
        if isinstance(error, NotAuthorized):
            text = (
                f"{self._place} refused the job token of host {host}; give all hosts the same LOCKSTEP_JOB_TOKEN and "
                "--job-id"
            )
            return {"kind": FailureKind.CONFIG.name, "text": text}
        if isinstance(error, NotLauncher):
            sent = f" (it sent {str(error)!r})" if str(error) else ""
            text = f"what listens on {self._place} isn't a launcher of Lockstep{sent}; give --rendezvous another port"
            return {"kind": FailureKind.CONFIG.name, "text": text}
        text = f"host {host} could not reach {self._place} within {self._limit}: {self._reason}; {self._remedy}"
        return {"kind": FailureKind.FAILED.name, "text": text}

    async def _connect(self) -> Streams:
        """Connect to the first of the host's addresses that accepts."""
        loop = asyncio.get_running_loop()
        self._stage = f"no name server answers for {self._host}"
        addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        self._stage = f"{self._place} doesn't answer"
        failure: OSError = ConnectionError(f"{self._host} has no address")
        for family, kind, protocol, _, address in addresses:
            try:
                return await asyncio.open_connection(sock=await _connected(family, kind, protocol, address))
            except OSError as error:
                failure = error
        raise failure

    def _understand(self, error: OSError) -> None:
        """Note why it isn't reached, and what the user can do."""
        self._remedy = f"start the same command on the host of {self._place}, and let the hosts reach it"
        if isinstance(error, socket.gaierror):
            self._reason = f"the name {self._host} can't be resolved ({error.strerror})"
            self._remedy = "correct the name, or give --rendezvous an address of node 0, such as 10.0.0.1:29500"
        elif error.errno == errno.ECONNREFUSED:
            self._reason = f"nothing listens on {self._place}"
        elif error.errno in _NO_ROUTE:
            self._reason = f"{self._place} isn't reached from here ({os.strerror(error.errno)})"
            self._remedy = "give --rendezvous an address of node 0 in a network that this host reaches"
        elif error.errno and not isinstance(error, ConnectionResetError):
            self._reason = f"{self._place}: {os.strerror(error.errno)}"
        elif isinstance(error, TimeoutError):
            self._reason = self._stage
        else:
            self._reason = f"what listens on {self._place} closes the connection"

    async def _report(self, note: Callable[[str], None]) -> None:
        noted: set[str] = set()
        while True:
            await asyncio.sleep(_NOTED_S)
            reason = self._reason or self._stage
            if reason not in noted:
                noted.add(reason)
                note(f"{reason}; trying again for up to {self._limit}")


async def _connected(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


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
