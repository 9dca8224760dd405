"""The part that the relays of all hosts have in common: launcher, tasks that end with the relay, heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from lockstep.launch.host_protocol import HEARTBEAT_S, Link, Message
from lockstep.launch.memory_copying import MemoryCopier, remove_drafts
from lockstep.launch.memory_serving import Address, MemoryServer
from lockstep.launch.strangers import Doorkeeper

CONFIG_ERROR, FAILED = 2, 1  # exit codes
_BEAT: Message = {"type": "beat"}


class SharedMemory:
    """The snapshots in this host's memory, as the other hosts have to do with them: served, and copied in a ring.

    Args:
        is_used: Whether the run takes snapshots.
        leader: Address of the leader's relay, as this host knows it.
        note: Called in any thread with what the user should know.
    """

    def __init__(self, is_used: bool, leader: Address, key: bytes, note: Callable[[str], None]) -> None:
        self.is_used = is_used
        self.server = MemoryServer()
        self._leader = leader
        self._key = key
        self._note = note
        self._folder: Path | None = None
        self._source: Address | None = None
        self._copier: MemoryCopier | None = None

    def open_folder(self, folder: Path) -> None:
        """Serve this folder, and copy what the host before has into it."""
        self._folder = folder
        self.server.open(folder)
        remove_drafts(folder)
        self._start()

    def begin_round(self, world: Message, node: int) -> Message:
        """Copy from the host before from now on; return the addresses of all hosts' memory; none if one has none."""
        addresses = [self._leader, *(host["memory"] for host in world["hosts"][1:])]
        if not self.is_used or None in addresses:
            return {}
        before = addresses[node - 1] if len(addresses) > 1 else None
        self._source = (before[0], before[1]) if before is not None else None
        self._start()
        return {"memories": addresses}

    def _start(self) -> None:
        if self._copier is not None:
            self._copier.stop()
            self._copier = None
        if self._folder is not None and self._source is not None:
            self._copier = MemoryCopier(self._folder, self._source, self._key, self._note)
            self._copier.start()


class Relay:
    """The launcher, and tasks that end with the relay.

    Attributes:
        timeout: Seconds that hosts have to meet, as the config's key `limit` has it.
        silence: Seconds without a message after which a host is lost.
    """

    def __init__(self, launcher: Link, order: Message) -> None:
        self._loop = asyncio.get_running_loop()
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
        self.memory = SharedMemory(order["memory"], self.address, self.key, self._note_later)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def note(self, text: str) -> None:
        self.launcher.send({"type": "note", "text": text})

    def _note_later(self, text: str) -> None:
        """Note what another thread reports."""
        self._loop.call_soon_threadsafe(self.note, text)

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
