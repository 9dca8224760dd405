"""The part that the relays of all hosts have in common: launcher, tasks that end with the relay, heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from lockstep.launch.host_protocol import HEARTBEAT_S, Link, Message, NotAuthorized, NotLauncher, welcome

_UNPROVEN, _UNPROVEN_OF_HOST = 4096, 1024  # connections without a proof of the token, of all and of an address
_REFUSALS = 16  # addresses that are reported


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


CONFIG_ERROR, FAILED = 2, 1  # exit codes
_BEAT: Message = {"type": "beat"}


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
