"""A run on hosts that ssh reaches: connections, output, signals, and how it has ended.

The output of node 0 goes to this terminal, the others' to HOST.log in the job's folder. Ctrl-C goes to node 0, and its
launcher stops all; the second one goes to all.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO, cast

from lockstep.core.errors import Paused, RunFailed, Stopped
from lockstep.core.stopping import SAVE_SIGNAL, handled_signals
from lockstep.core.terminal import echo, plain
from lockstep.launchers.host_agent import BEAT_S, REPLY

_ANSWER_S = 30.0  # of a host, from the start of its connection on
_OTHERS_END_S = 10.0  # after a launcher has failed or node 0 has ended: all know of it by then, if they have met
_KILLED_S = 15.0  # beyond the grace of a host
_CHUNK = 1 << 16
_SHOWN_LINES = 5
_NO_CONNECTION = 255  # exit code of ssh
_NOT_EXECUTABLE, _NOT_THERE = 126, 127  # exit codes of a shell


class SshHost:
    """A host, and the program `ssh` that is connected with Lockstep's process there.

    Attributes:
        log: File for the command's output; None: this terminal.
        code: Exit code of the command, or ssh's own; None while it runs.
    """

    def __init__(self, name: str, words: Sequence[str], log: Path | None) -> None:
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(words, 0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except FileNotFoundError:
            raise RunFailed("ssh is not installed here; install OpenSSH's client") from None
        streams = (self.process.stdin, self.process.stdout, self.process.stderr)
        self.stdin, self.stdout, self.stderr = (cast("IO[bytes]", stream) for stream in streams)
        self.name = name
        self.log = log
        self.code: int | None = None
        self._errors = b""
        self._half: dict[IO[bytes], bytes] = {}

    def facts(self, until: float) -> Mapping[str, Any]:
        """Return what the process there says about the host; a `problem` is a sentence about it."""
        received = b""
        while select.select([self.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            data = os.read(self.stdout.fileno(), _CHUNK)
            received += data
            *lines, _ = received.split(b"\n")
            reply = next((line for line in lines if line.startswith(REPLY.encode())), None)
            if reply is not None:
                known: Mapping[str, Any] = json.loads(reply[len(REPLY) :])
                return known
            if not data:
                return {"problem": self._why_ended(self.stderr.read().decode(errors="replace"))}
        return {"problem": f"it has not answered within {_ANSWER_S:g} s"}

    def send(self, line: str) -> None:
        """Send a line; a lost connection is noticed where its end is waited for."""
        if self.stdin.closed:
            return
        data = f"{line}\n".encode()
        with suppress(OSError):
            while data:  # without a buffer: signal handlers call this, too
                data = data[os.write(self.stdin.fileno(), data) :]

    def hang_up(self) -> None:
        """Close stdin: the process there ends, and what it has started."""
        with suppress(OSError):
            self.stdin.close()

    def read(self, source: IO[bytes], terminal: TextIO) -> bool:
        """Pass on output that has come on stdout or stderr; return False at its end."""
        data = os.read(source.fileno(), _CHUNK)
        if source is self.stderr:
            self._errors = (self._errors + data)[-_CHUNK:]
        with suppress(OSError):  # the terminal is gone: the hosts have yet to save
            if self.log is not None:
                with self.log.open("ab") as file:
                    file.write(data)
            else:
                text = self._half.pop(source, b"") + data
                whole, _, self._half[source] = text.rpartition(b"\n") if data else (text, b"", b"")
                if whole:
                    echo(plain(whole.decode(errors="replace")), file=terminal, flush=True)
        return bool(data)

    def end_of_errors(self, lines: int) -> list[str]:
        """Return the last lines of its stderr."""
        return self._errors.decode(errors="replace").strip().splitlines()[-lines:]

    @property
    def is_lost(self) -> bool:
        """Return whether ssh has ended without the exit code of the command."""
        return self.code is not None and (self.code == _NO_CONNECTION or self.code < 0)

    def _why_ended(self, errors: str) -> str:
        """Return why ssh has ended without an answer, with a remedy."""
        code, lines = self.process.wait(), [line.strip() for line in errors.splitlines() if line.strip()]
        why = lines[-1].removeprefix("ssh: ") if lines else ""
        if code == _NO_CONNECTION:
            return f"it can't be reached ({why}); `ssh {self.name} true` has to work without a question"
        if code in (_NOT_THERE, _NOT_EXECUTABLE):
            return f"Lockstep is not there ({why}); install it there, or give its path with --program"
        return f"Lockstep has ended there with {code}: {'; '.join(lines[-_SHOWN_LINES:])}; it needs the version here"


def rendezvous_of(hosts: Sequence[SshHost]) -> str:
    """Wait for all hosts, and return an address and a free port of the first. Raises RunFailed: a host is unfit."""
    until = time.monotonic() + _ANSWER_S
    facts = {host.name: host.facts(until) for host in hosts}
    problems = [f"\n  {name}: {each['problem']}" for name, each in facts.items() if "problem" in each]
    if problems:
        count = f"{len(problems)} of {len(hosts)} hosts" if len(hosts) > 1 else "the host"
        raise RunFailed(f"{count} can't take part, and nothing was started:{''.join(problems)}")
    first = facts[hosts[0].name]
    return f"[{first['address']}]:{first['port']}" if ":" in first["address"] else f"{first['address']}:{first['port']}"


@dataclass
class SshRun:
    """The command on all hosts; the first is node 0. `grace` is as of the option."""

    hosts: Sequence[SshHost]
    grace: float
    _ended: list[SshHost] = field(default_factory=list)
    _stops: int = 0
    _hung_up: bool = False
    _deadline: float = float("inf")

    def follow(self) -> int:
        """Print the output of node 0 until all have ended; return the run's exit code."""
        with handled_signals(self._stop, self._save):
            self._wait()
        return self._code()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        for host in self.hosts[: 1 if self._stops == 1 else None]:
            host.send(str(int(number)))
        if self._stops > 1:
            self._deadline = min(self._deadline, time.monotonic() + _OTHERS_END_S)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.hosts[0].send(str(int(SAVE_SIGNAL)))

    def _wait(self) -> None:
        beat_at = 0.0
        with selectors.DefaultSelector() as selector:
            for host in self.hosts:
                selector.register(host.stdout, selectors.EVENT_READ, (host, sys.stdout))
                selector.register(host.stderr, selectors.EVENT_READ, (host, sys.stderr))
            while selector.get_map():
                now = time.monotonic()
                if now >= beat_at:
                    beat_at = now + BEAT_S
                    for host in self.hosts:
                        host.send("0")
                if now >= self._deadline:
                    self._end_rest()
                for key, _ in selector.select(max(0.0, min(beat_at, self._deadline) - now)):
                    host, terminal = key.data
                    if not host.read(key.fileobj, terminal):
                        selector.unregister(key.fileobj)
                        if not any(source in selector.get_map() for source in (host.stdout, host.stderr)):
                            self._note_end(host)

    def _note_end(self, host: SshHost) -> None:
        host.code = host.process.wait()
        self._ended.append(host)
        host.hang_up()
        if host.is_lost and not self._hung_up:
            why = " ".join(host.end_of_errors(1)).removeprefix("ssh: ") or f"ssh has ended with {host.code}"
            with suppress(OSError):
                echo(f"lockstep: the connection to {host.name} is lost: {why}", file=sys.stderr, flush=True)
        if host is self.hosts[0] or host.code not in (0, Paused.exit_code):
            saves = self.grace if host.is_lost else 0.0  # a host that lost its connection saves, and so do all
            self._deadline = min(self._deadline, time.monotonic() + saves + _OTHERS_END_S)

    def _end_rest(self) -> None:
        """Hang up, so that what still runs is ended there; then end what connects to it."""
        for host in self.hosts:
            if host.code is None:
                if self._hung_up:
                    os.killpg(host.process.pid, signal.SIGKILL)
                host.hang_up()
        self._deadline = float("inf") if self._hung_up else time.monotonic() + self.grace + _KILLED_S
        self._hung_up = True

    def _code(self) -> int:
        """Return node 0's exit code; or, if node 0 had to be ended for a failed host, that host's."""
        first, leader = self._ended[0], self.hosts[0]
        if self._hung_up and first is not leader and first.code not in (0, Paused.exit_code):
            lines = "".join(f"\n  {line}" for line in first.end_of_errors(_SHOWN_LINES))
            with suppress(OSError):
                echo(f"lockstep: host {first.name} has ended with {first.code}:{lines}", file=sys.stderr, flush=True)
            leader = first
        if leader.is_lost:
            return Stopped.exit_code if self._stops > 1 else 1
        return leader.code or 0
