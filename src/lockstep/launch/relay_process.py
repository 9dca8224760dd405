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

from lockstep.core.stopping import blocked_signals

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

    def __init__(self, listener: socket.socket | None, order: Mapping[str, Any]) -> None:
        self.has_ended = False
        self.channel, self._process = _started(listener)
        self.send(order)

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
