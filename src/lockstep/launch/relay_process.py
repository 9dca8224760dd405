"""The launcher's side of its relay: the process, and the channel over which they send each other messages."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep.core.errors import RunFailed
from lockstep.core.stopping import blocked_signals

LOST_RELAY = "the process that connects this host with the others has ended"
_MOST_RESTARTS = 3  # of a launch: what ends it so often would end the next one, too
_ENDS_S = 10.0  # seconds by which a relay must have ended
_ROOT = str(Path(__file__).parents[2])


class RelayProcess:
    """A relay that runs until it is closed.

    Args:
        listener: The socket at the rendezvous, which it takes over; None: another host listens there.
        order: What it has to know.

    Attributes:
        channel: Readable when there is a message.
        has_ended: Whether it has ended by itself.
    """

    channel: Connection

    def __init__(self, listener: socket.socket | None, order: Mapping[str, Any]) -> None:
        self._order = order
        self._listens_at = None if listener is None else (listener.family, listener.getsockname()[:2])
        self._restarts = 0
        self._start(listener)

    def restart(self, **changes: Any) -> None:
        """Start another one after this one has ended, for the same host; `changes` to what it has to know.

        Raises RunFailed if it has ended too often, or its address is taken.
        """
        self.close()
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise RunFailed(f"{LOST_RELAY} {self._restarts} times")
        self._order, listener = {**self._order, **changes}, None
        if self._listens_at is not None:
            family, (host, port) = self._listens_at
            try:
                listener = socket.create_server((host, port), family=family, backlog=1024)
            except OSError as error:
                raise RunFailed(
                    f"{LOST_RELAY}, and {host}:{port} can't be listened on again: {error.strerror}"
                ) from None
        self._start(listener)

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended; `receive` finds that
            self.channel.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None: the relay has ended."""
        try:
            message: dict[str, Any] = json.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            self.has_ended = True
            return None
        return message

    def _start(self, listener: socket.socket | None) -> None:
        self.has_ended = False
        self.channel, self._process = _started(listener)
        self.send(self._order)

    def close(self) -> None:
        """End it, once it has sent what it has."""
        self.channel.close()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _started(listener: socket.socket | None) -> tuple[Connection, subprocess.Popen[bytes]]:
    own, its = socket.socketpair()
    passed = [its.fileno(), *([] if listener is None else [listener.fileno()])]
    numbers = f"{its.fileno()}, {-1 if listener is None else listener.fileno()}, {os.getpid()}"
    code = f"import sys; sys.path.append({_ROOT!r}); from lockstep.launch.relay import main; main({numbers})"
    with blocked_signals(forks=True):  # until it ignores them
        process = subprocess.Popen([sys.executable, "-P", "-c", code], pass_fds=passed, stdin=subprocess.DEVNULL)
    its.close()
    if listener is not None:
        listener.close()
    return Connection(own.detach()), process
