"""The process beside each launcher that connects its host with the others; it needs no torch, and is up before it.

    host a   launcher -- proxy, which listens at the rendezvous --.-- store of rank 0, on loopback
                              |                                   |
    host b   launcher -- proxy                      ranks -- a port on loopback, a connection each

All connections go to the leader's proxy, and begin with a proof of the job's token (`channel`). A host is lost when its
connection ends, or when nothing has come from it for some seconds. Unreachable hosts are tried again.
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
from lockstep.launch.channel import (
    HOST,
    LOOPBACK,
    Link,
    Message,
    NotAuthorized,
    NotLauncher,
    Proxy,
    Streams,
    introduce,
    join,
    store_of,
)
from lockstep.launch.membership import Leader

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0  # between two attempts
_CONNECT_S = 5.0
_NOTED_S = 0.5  # until the reason why it isn't reached yet is noted, and each further reason
_LAST_WORDS_S = 5.0  # for the leader to read what this host has sent


class Rendezvous:
    """The leader's address, as another host sees it, and as the user gave it."""

    def __init__(self, address: tuple[str, int], place: str, key: bytes) -> None:
        self._address = address
        self._place = place
        self._key = key

    async def reach(self, seconds: float, note: Callable[[str], None]) -> Link:
        """Connect to the leader, and try again for some seconds. Raises NotAuthorized, NotLauncher, OSError."""
        began, pause, noted = time.monotonic(), _FIRST_PAUSE_S, set[str]()
        while True:
            try:
                async with asyncio.timeout(began + seconds - time.monotonic()):
                    return Link(await self.open(HOST))
            except OSError as error:
                waited, reason = time.monotonic() - began, self.why_not(error)
                if waited >= _NOTED_S and reason not in noted:
                    noted.add(reason)
                    note(f"{reason}; trying again for up to {seconds:g} s")
                if waited + pause >= seconds:
                    raise
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    async def open(self, wants: bytes) -> Streams:
        """Connect to the leader once, with proofs of the token. Raises as `reach` does."""
        streams = await self._connect()
        try:
            await introduce(streams, self._key, wants)
        except BaseException:
            streams[1].close()
            raise
        return streams

    async def _connect(self) -> Streams:
        host, port = self._address
        failed = OSError(f"{host} has no address")
        addresses: Any = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, (address, _, *rest) in addresses:
            scope = f"%{rest[1]}" if rest and rest[1] else ""  # of a link-local IPv6 address
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(f"{address}{scope}", port)
            except OSError as error:
                failed = error
        raise failed

    def why_not(self, error: OSError) -> str:
        """Return why the leader isn't reached."""
        if isinstance(error, socket.gaierror):
            return f"the name {self._address[0]} can't be resolved ({error.strerror})"
        if error.errno == errno.ECONNREFUSED:
            return f"nothing listens on {self._place}"
        if isinstance(error, TimeoutError):
            return f"{self._place} doesn't answer as a launcher of Lockstep"
        return f"{self._place} isn't reached: {os.strerror(error.errno) if error.errno else error}"


class Follower(Proxy):
    """The proxy of a host that connects to the leader's."""

    def __init__(self, launcher: Link, order: Message) -> None:
        super().__init__(launcher, order)
        self._link: Link | None = None
        self._ports: asyncio.Server | None = None
        self._rendezvous = Rendezvous(self.address, self.place, self.key)
        self._connection = self.start(self._follow(self.timeout, "launch.timeout"))

    async def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                message = await self.launcher.receive()
                if message["type"] == "again":
                    self._connection.cancel()
                    if self._link is not None:
                        self._link.writer.transport.abort()
                        self._link = None
                    self._connection = self.start(self._follow(message["wait"], "recovery.host_wait"))
                elif not self._connection.done() and self._link is not None:
                    self._link.send(message)
        if self._link is not None:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._link.writer.drain()
            self._link.writer.close()
            with contextlib.suppress(OSError):
                await self._link.writer.wait_closed()

    async def _follow(self, seconds: float, key: str) -> None:
        try:
            link = self._link = await self._rendezvous.reach(seconds, self.note)
        except (NotAuthorized, NotLauncher, OSError) as error:
            self.launcher.send({"type": "result", **self._failure(error, f"{seconds:g} s ({key})")})
            return
        link.send(self.hello)
        self.start(link.beat())
        try:
            while True:
                message = await link.receive(self.silence)
                if message["type"] == "world":
                    message["address"] = link.writer.get_extra_info("sockname")[0]
                    message["port"] = await self._forward(message["round"])
                if message["type"] != "beat":
                    self.launcher.send(message)
        except OSError as error:
            self.launcher.send({"type": "lost", "node": 0, "why": self.why_lost(error)})

    def _failure(self, error: Exception, limit: str) -> Message:
        host, place = f"host {self.hello['host']}", self.place
        if isinstance(error, OSError):
            why = f"{host} could not reach {place} within {limit}: {self._rendezvous.why_not(error)}"
            text = f"{why}; start the same command on the host of {place}, and let the hosts reach it"
            return {"kind": FailureKind.FAILED.name, "text": text}
        text = f"what listens on {place} isn't a launcher of Lockstep; give --rendezvous another port"
        if isinstance(error, NotAuthorized):
            remedy = "give all hosts the same LOCKSTEP_JOB_TOKEN and --job-id"
            text = f"{place} refused the job token of {host}; {remedy}"
        return {"kind": FailureKind.CONFIG.name, "text": text}

    async def _forward(self, number: int) -> int:
        """Listen on loopback for this host's ranks of a round, and relay them to its store; return the port."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await join((reader, writer), await self._rendezvous.open(store_of(number)))
            except (NotAuthorized, NotLauncher, OSError):
                writer.close()

        if self._ports is not None:
            self._ports.close()
        self._ports = await asyncio.start_server(connect, LOOPBACK, 0, backlog=1024)
        return int(self._ports.sockets[0].getsockname()[1])


async def _run(channel: int, listener: int, parent: int) -> None:
    loop = asyncio.get_running_loop()
    streams = await asyncio.open_unix_connection(sock=socket.socket(fileno=channel))
    launcher = Link(streams)
    order = await launcher.receive()
    leads = listener >= 0
    running = Leader(launcher, order).run(socket.socket(fileno=listener)) if leads else Follower(launcher, order).run()
    proxy = loop.create_task(running)
    with contextlib.suppress(ProcessLookupError):  # its ranks have copies of the channel, which may stay open longer
        handle = os.pidfd_open(parent)

        def end() -> None:
            loop.remove_reader(handle)
            streams[0].feed_eof()

        loop.add_reader(handle, end)
        await proxy


def main(channel: int, listener: int, parent: int) -> None:
    """Run a proxy until its launcher (process `parent`) ends, or closes the channel; both sockets are descriptors."""
    for number in (*STOP_SIGNALS, SAVE_SIGNAL):  # the launcher handles them
        signal.signal(number, signal.SIG_IGN)
    raise_open_file_limit()
    with contextlib.suppress(OSError):
        asyncio.new_event_loop().run_until_complete(_run(channel, listener, parent))
    sys.stderr.flush()
    os._exit(0)  # connections that are open end with the process
