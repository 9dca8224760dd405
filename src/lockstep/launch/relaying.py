"""The part that the relays of all hosts have in common: launcher, tasks that end with the relay, heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from lockstep.launch.host_protocol import HEARTBEAT_S, Link, Message
from lockstep.launch.strangers import Doorkeeper

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
