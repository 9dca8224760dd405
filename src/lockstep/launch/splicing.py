"""The connections of ranks with a store on another host, passed on as they are: a callback for each piece of data.

    rank --> end . other --> end --> relay of the leader --> end . other --> end --> store

Hundreds of ranks share the relay at the rendezvous. A stream's reader and writer would wake a task for each piece, and
take a tenth more of the processor's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

_LOOPBACK = "127.0.0.1"


class StoreEnd(asyncio.Protocol):
    """An end of two connections that are joined: what it receives, the other sends.

    Until then it reads nothing; but until Python 3.11.3, asyncio reads a new connection once although it is paused.

    Attributes:
        is_over: Set when the connection has ended.
    """

    def __init__(self, opened: Callable[[StoreEnd], None] | None = None) -> None:
        self.is_over = asyncio.Event()
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._other: asyncio.Transport | None = None
        self._early = b""  # what came before it was joined

    def join(self, other: StoreEnd) -> None:
        """Pass on what each of both receives from now on, until one has ended."""
        pairs = ((self, other), (other, self))
        for near, far in pairs:
            near._other = far._transport
            near.data_received(near._early)
        for near, far in pairs:
            if far.is_over.is_set():
                near.close()
            elif near._transport is not None and not near._transport.is_closing():
                near._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)
        else:
            self._early += data

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over.set()
        if self._other is not None:
            self._other.close()


def taken_over(writer: asyncio.StreamWriter) -> StoreEnd:
    """Return the end of a stream's connection, over which nothing more has been sent to this side yet."""
    end = StoreEnd()
    writer.transport.set_protocol(end)
    end.connection_made(writer.transport)
    return end


async def connect_with_store(near: StoreEnd, port: int) -> None:
    """Connect a rank of another host with the store on loopback, until one side ends."""
    far = StoreEnd()
    try:
        await asyncio.get_running_loop().create_connection(lambda: far, _LOOPBACK, port)
    except OSError:  # rank 0 has ended
        near.close()
        return
    near.join(far)
    await near.is_over.wait()


async def listen_for_ranks(opened: Callable[[StoreEnd], None]) -> asyncio.Server:
    """Listen on loopback, on any free port, and pass each connection to a function."""
    return await asyncio.get_running_loop().create_server(lambda: StoreEnd(opened), _LOOPBACK, 0, backlog=1024)
