"""A run on hosts by ssh or Ray, from its start to its end: output, signals, and how it has ended.

node 0       --> this terminal, and its exit code
the others   --> HOST.log in the job's folder
Ctrl-C       --> node 0, whose launcher stops all; the second one --> all
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from lockstep.core.errors import Paused, Stopped
from lockstep.core.stopping import SAVE_SIGNAL, handled_signals
from lockstep.core.terminal import echo, plain
from lockstep.launchers.host_agent import BEAT_S
from lockstep.launchers.host_connection import HostConnection

_OTHERS_END_S = 10.0  # after a launcher has failed or node 0 has ended: all know of it by then, if they have met
_KILLED_S = 15.0  # beyond the grace of a host
_CHUNK = 1 << 16
_SHOWN_LINES = 5


@dataclass
class _HostOutput:
    """Output of a host: of node 0 to this terminal, of others to a file."""

    source: IO[bytes]
    target: TextIO | None
    log: Path
    rest: bytes = b""
    last: bytes = b""

    def read(self) -> bool:
        data = os.read(self.source.fileno(), _CHUNK)
        self.last = (self.last + data)[-_CHUNK:]
        with suppress(OSError):  # the terminal is gone: the hosts have yet to save
            if self.target is None:
                with self.log.open("ab") as file:
                    file.write(data)
            else:
                lines, _, self.rest = (self.rest + data).rpartition(b"\n") if data else (self.rest, b"", b"")
                if lines:
                    echo(plain(lines.decode(errors="replace")), file=self.target, flush=True)
        return bool(data)


@dataclass
class RemoteRun:
    """The command on all hosts; the first is node 0.

    Attributes:
        connections: To the hosts, on which the command has been started.
        logs: A file for the output of each of them.
        grace: Seconds that a host has to save when the connection to it is lost.
        lost: Hosts whose connection was lost, as it was printed.
    """

    connections: Sequence[HostConnection]
    logs: Sequence[Path]
    grace: float
    lost: list[str] = field(default_factory=list)
    _codes: dict[HostConnection, int] = field(default_factory=dict)
    _streams: dict[IO[bytes], _HostOutput] = field(default_factory=dict)
    _stops: int = 0
    _hung_up: bool = False
    _deadline: float = float("inf")

    def follow(self) -> int:
        """Print the output of node 0 until all have ended; return the run's exit code."""
        with handled_signals(self._stop, self._save):
            self._wait()
        return self._code()

    @property
    def was_stopped(self) -> bool:
        """Return whether a signal has stopped the run."""
        return self._stops > 0

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        for connection in self.connections[: 1 if self._stops == 1 else None]:
            connection.send("signal", number=number)
        if self._stops > 1:
            self._deadline = min(self._deadline, time.monotonic() + _OTHERS_END_S)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.connections[0].send("signal", number=int(SAVE_SIGNAL))

    def _wait(self) -> None:
        beat_at = 0.0
        with selectors.DefaultSelector() as selector:
            for number, connection in enumerate(self.connections):
                process = connection.process
                for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    stream = _HostOutput(source, target if number == 0 else None, self.logs[number])
                    self._streams[source] = stream
                    selector.register(source, selectors.EVENT_READ, (connection, stream))
            while selector.get_map():
                now = time.monotonic()
                if now >= beat_at:
                    beat_at = now + BEAT_S
                    for connection in self.connections:
                        connection.send("beat")
                if now >= self._deadline:
                    self._end_rest()
                for key, _ in selector.select(max(0.0, min(beat_at, self._deadline) - now)):
                    connection, stream = key.data
                    if not stream.read():
                        selector.unregister(key.fileobj)
                        self._note_end(connection, selector)

    def _note_end(self, connection: HostConnection, selector: selectors.BaseSelector) -> None:
        """Note the exit code once both streams of a host have ended."""
        process = connection.process
        if any(source in selector.get_map() for source in (process.stdout, process.stderr)):
            return
        code = self._codes[connection] = process.wait()
        connection.hang_up()
        why = process.why_lost(self._streams[process.stderr].last.decode(errors="replace"))
        if why is not None and not self._hung_up:
            self.lost.append(connection.host)
            with suppress(OSError):
                echo(f"lockstep: the connection to {connection.host} is lost: {why}", file=sys.stderr, flush=True)
        if connection is self.connections[0] or code not in (0, Paused.exit_code):
            saves = self.grace if why is not None else 0.0  # a host whose connection is lost saves, and so do all
            self._deadline = min(self._deadline, time.monotonic() + saves + _OTHERS_END_S)

    def _end_rest(self) -> None:
        """Hang up, so that what still runs is ended there; then end what connects to it."""
        for connection in self.connections:
            if connection not in self._codes:
                if self._hung_up:
                    connection.process.kill()
                connection.hang_up()
        self._deadline = float("inf") if self._hung_up else time.monotonic() + self.grace + _KILLED_S
        self._hung_up = True

    def _code(self) -> int:
        """Return node 0's exit code; that of the host that has failed before, if node 0 had to be ended for it."""
        first, code = next(iter(self._codes.items()))
        leader = self._codes[self.connections[0]]
        is_lost = self.connections[0].process.why_lost("") is not None
        if self._hung_up and first is not self.connections[0] and code not in (0, Paused.exit_code):
            self._show_end(first, code)
            return code if first.process.why_lost("") is None else 1
        if self._stops > 1 and is_lost:
            return Stopped.exit_code
        return 1 if is_lost else leader

    def _show_end(self, connection: HostConnection, code: int) -> None:
        text = self._streams[connection.process.stderr].last.decode(errors="replace").strip()
        lines = "".join(f"\n  {line}" for line in text.splitlines()[-_SHOWN_LINES:])
        with suppress(OSError):
            echo(f"lockstep: host {connection.host} has ended with {code}:{lines}", file=sys.stderr, flush=True)
