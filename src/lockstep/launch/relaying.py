"""The part that the relays of all hosts have in common: launcher, tasks that end with the relay, heartbeats.

    rank --> end . other --> end --> relay of the leader --> end . other --> end --> store

Connections of ranks with a store on another host are passed on by a callback for each piece of data: hundreds of ranks
share the relay at the rendezvous, and a stream's reader and writer would wake a task for each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from lockstep.launch.host_protocol import HEARTBEAT_S, Link, Message, NotAuthorized, NotLauncher, welcome

_LOOPBACK = "127.0.0.1"
_UNPROVEN, _UNPROVEN_OF_HOST = 4096, 1024  # connections without a proof of the token, of all and of an address
_REFUSALS = 16  # addresses that are reported
_BEAT: Message = {"type": "beat"}


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


class Doorkeeper:
    """Lets those in who know the job's token.

    Args:
        note: Called with what the user should know.
    """

    def __init__(self, key: bytes, note: Callable[[str], None]) -> None:
        self._key = key
        self._note = note
        self._refused: set[str] = set()
        self._unproven: dict[asyncio.StreamWriter, str] = {}  # the oldest first

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Return what the other side wants, once it has proven the token; empty: it hasn't."""
        self._limit(writer)
        try:
            return await welcome(reader, writer, self._key)
        except (NotAuthorized, NotLauncher) as error:
            self._note_refusal(address_of(writer), error)
            return b""
        finally:
            self._unproven.pop(writer, None)

    def _limit(self, writer: asyncio.StreamWriter) -> None:
        """Note a connection, and end the oldest of those whose address holds too many without a proof."""
        self._unproven[writer] = address_of(writer)
        same = [other for other, address in self._unproven.items() if address == address_of(writer)]
        if len(same) > _UNPROVEN_OF_HOST or len(self._unproven) > _UNPROVEN:
            oldest = same[0] if len(same) > _UNPROVEN_OF_HOST else next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()

    def _note_refusal(self, host: str, error: Exception) -> None:
        if host not in self._refused and len(self._refused) < _REFUSALS:
            self._refused.add(host)
            reason = "has another job token" if isinstance(error, NotAuthorized) else "isn't a launcher of Lockstep"
            self._note(f"a connection from {host} was refused: it {reason}")


def address_of(writer: asyncio.StreamWriter) -> str:
    """Return the address of the other side."""
    peer = writer.get_extra_info("peername")
    return str(peer[0]).removeprefix("::ffff:") if peer else "unknown"


class Relay:
    """The launcher, and tasks that end with the relay.

    Attributes:
        timeout: Seconds that hosts have to meet, as the config's key `limit` has it.
        silence: Seconds without a message after which a host is lost.
    """

    def __init__(self, launcher: Link, order: Message) -> None:
        self.launcher = launcher
        self.key = bytes.fromhex(order["key"])
        self.hello: Message = order["hello"]
        self.timeout: float = order["timeout"]
        self.limit: str = order["limit"]
        self.silence: float = order["silence"]
        self.recovers: bool = order["recovers"]
        self.address: tuple[str, int] = (order["address"][0], order["address"][1])
        self.place = f"{order['name']}:{order['address'][1]}"
        self.doorkeeper = Doorkeeper(self.key, self.note)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def note(self, text: str) -> None:
        self.launcher.send({"type": "note", "text": text})

    def why_lost(self, error: OSError) -> Message:
        """Return the fields of a message about a host whose connection has failed."""
        if isinstance(error, TimeoutError) and not error.errno:
            return {"why": f"nothing has come from it for {self.silence:g} s", "silent": True}
        return {"why": "its connection was closed"}


async def heartbeat(link: Link) -> None:
    """Let the other side know that this one lives, until the connection ends."""
    while not link.writer.is_closing():
        link.send(_BEAT)
        await asyncio.sleep(HEARTBEAT_S)
