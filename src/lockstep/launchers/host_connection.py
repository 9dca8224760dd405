"""A connection to Lockstep's process on a host: requests, replies, and why one doesn't come.

HostConnection -- lines of JSON --> stdin  HostProcess  `lockstep launch at-host`, over ssh or through Ray
               <-- replies, then the output of the command -- stdout, stderr
"""

from __future__ import annotations

import json
import os
import select
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, Protocol

from lockstep.launchers.host_agent import REPLY

_ANSWER_S = 30.0  # of a host; the first answer takes the connection's time, too
_CHUNK = 1 << 16
_KEPT = 1 << 16  # bytes of what a host prints before it answers


class HostUnfit(Exception):
    """A host can't take part; the message is a sentence about it."""


class HostProcess(Protocol):
    """Lockstep's process on a host, by its streams, which have no buffer."""

    @property
    def stdin(self) -> IO[bytes]: ...

    @property
    def stdout(self) -> IO[bytes]: ...

    @property
    def stderr(self) -> IO[bytes]: ...

    @abstractmethod
    def wait(self) -> int:
        """Wait for its end and return its exit code."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def why_ended(self, errors: str) -> str:
        """Return why it has ended without an answer, as a sentence about the host."""

    @abstractmethod
    def why_lost(self, errors: str) -> str | None:
        """Return why the connection has ended without the command's exit code; None: there is one."""


class HostConnection:
    """A connection to one host.

    Attributes:
        host: Its name, as the user knows it.
        process: Lockstep's process there.
        addresses: Addresses at which it is probably reached by others.
    """

    def __init__(self, host: str, process: HostProcess, addresses: tuple[str, ...] = ()) -> None:
        self.host = host
        self.process = process
        self.addresses = addresses
        self._out = self._err = b""

    def send(self, do: str, **fields: object) -> None:
        """Send a request; a lost connection is noticed where its end is waited for."""
        if self.process.stdin.closed:
            return
        data = f"{json.dumps({'do': do, **fields})}\n".encode()
        with suppress(OSError):
            while data:  # without a buffer: signal handlers call this, too
                data = data[os.write(self.process.stdin.fileno(), data) :]

    def ask(self, do: str, **fields: object) -> Mapping[str, Any]:
        """Return the host's answer. Raises HostUnfit."""
        self.send(do, **fields)
        until = time.monotonic() + _ANSWER_S
        while True:
            line, newline, rest = self._out.partition(b"\n")
            if newline:
                self._out = rest
                if line.startswith(REPLY.encode()):
                    return self._checked(line[len(REPLY) :])
                continue
            if not self._receive(until - time.monotonic()):
                raise HostUnfit(self.process.why_ended(self._err.decode(errors="replace")))

    def hang_up(self) -> None:
        """Close stdin: the process there ends, and what it has started."""
        with suppress(OSError):
            self.process.stdin.close()

    def _checked(self, text: bytes) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = json.loads(text)
        if "problem" in answer:
            raise HostUnfit(answer["problem"])
        return answer

    def _receive(self, seconds: float) -> bool:
        """Read more of what the host prints; return False if nothing comes any more."""
        streams = [self.process.stdout, self.process.stderr]
        while streams:
            ready, _, _ = select.select(streams, [], [], max(0.0, seconds))
            if not ready:
                raise HostUnfit(f"it has not answered within {_ANSWER_S:g} s")
            for stream in ready:
                data = os.read(stream.fileno(), _CHUNK)
                if not data:
                    streams.remove(stream)
                elif stream is self.process.stderr:
                    self._err = (self._err + data)[-_KEPT:]
                else:
                    self._out = (self._out + data)[-_KEPT:]
            if self.process.stdout in ready and self.process.stdout in streams:
                return True
        return False


def last_line(text: str) -> str:
    """Return the last line that isn't empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
