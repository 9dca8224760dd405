"""How a host reaches the launcher at the rendezvous, and what is reported meanwhile.

    HOST:PORT --> addresses --> connection --> greeting --> proof of the token --> a link
    no such name, nothing listens, no route, no answer: noted at once, and tried again until the time is over
    another program, another job token: an error at once

A name server may learn a name later (Kubernetes), and another host's launcher may be started later.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep.launch.host_protocol import HOST, Link, Message, NotAuthorized, NotLauncher, introduce

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0  # between two attempts
_CONNECT_S = 5.0
_NOTED_S = 0.5  # after which the reason why it isn't reached yet is noted, and each further reason
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_CONFIG_ERROR, _FAILED = 2, 1  # exit codes

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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
        """Return the code and the text of the result if this host, of that name, has not reached the leader."""
        if isinstance(error, NotAuthorized):
            text = (
                f"{self._place} refused the job token of host {host}; give all hosts the same LOCKSTEP_JOB_TOKEN and "
                "--job-id"
            )
            return {"code": _CONFIG_ERROR, "text": text}
        if isinstance(error, NotLauncher):
            sent = f" (it sent {str(error)!r})" if str(error) else ""
            text = f"what listens on {self._place} isn't a launcher of Lockstep{sent}; give --rendezvous another port"
            return {"code": _CONFIG_ERROR, "text": text}
        text = f"host {host} could not reach {self._place} within {self._limit}: {self._reason}; {self._remedy}"
        return {"code": _FAILED, "text": text}

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
