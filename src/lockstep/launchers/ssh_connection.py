"""A connection to a host by the program `ssh`, and what its failures mean."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from lockstep.launchers.ssh_host import REPLY

_ANSWER_S = 30.0  # of a host; the first answer takes the connection's time, too
_CHUNK = 1 << 16
_KEPT = 1 << 16  # bytes of what a host prints before it answers
_MOST_LINES = 3
_NO_CONNECTION = 255  # exit code of ssh
_NOT_EXECUTABLE, _NOT_THERE = 126, 127  # exit codes of a shell
SSH_OPTIONS = (
    *("-T", "-x", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10"),
    *("-oServerAliveInterval=5", "-oServerAliveCountMax=6", "-oControlMaster=no", "-oControlPath=none"),
)
"""Options with which ssh never asks, notices a lost connection, and shares none with other processes."""

_REMEDIES = {
    "IDENTIFICATION HAS CHANGED": "its host key is not the one in known_hosts: find out why before you remove the old "
    "one with `ssh-keygen -R {host}`",
    "Host key verification failed": "its host key is not known: call `ssh {host}` once and compare the fingerprint",
    "Permission denied": "it refuses your key ({why}): `ssh-copy-id {host}` installs it, `ssh-add` opens one that has "
    "a passphrase",
    "Could not resolve hostname": "there is no such host ({why}): correct its name, or add it to ~/.ssh/config",
}


class HostUnfit(Exception):
    """A host can't take part; the message is a sentence about it."""


class HostConnection:
    """The program `ssh` to one host, and Lockstep's process there.

    Attributes:
        host: As ssh knows it.
        process: ssh.
    """

    def __init__(self, host: str, words: Sequence[str], program: str) -> None:
        self.host = host
        self.process = subprocess.Popen(
            words, 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._program = program
        self._out = self._err = b""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def errors(self) -> IO[bytes]:
        assert self.process.stderr is not None
        return self.process.stderr

    def send(self, do: str, **fields: object) -> None:
        """Send a request; a lost connection is noticed where its end is waited for."""
        assert self.process.stdin is not None
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
                raise HostUnfit(self._why_ended())

    def hang_up(self) -> None:
        """Close stdin: the process there ends, and what it has started."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def why_lost(self, errors: str) -> str | None:
        """Return why ssh has ended without an exit code of the command; None: it has one."""
        if self.process.returncode == _NO_CONNECTION or self.process.returncode < 0:
            return _last_line(errors) or f"ssh has ended with {self.process.returncode}"
        return None

    def _checked(self, text: bytes) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = json.loads(text)
        if "problem" in answer:
            raise HostUnfit(answer["problem"])
        return answer

    def _receive(self, seconds: float) -> bool:
        """Read more of what the host prints; return False if nothing comes any more."""
        streams = [self.output, self.errors]
        while streams:
            ready, _, _ = select.select(streams, [], [], max(0.0, seconds))
            if not ready:
                raise HostUnfit(f"it has not answered within {_ANSWER_S:g} s")
            for stream in ready:
                data = os.read(stream.fileno(), _CHUNK)
                if not data:
                    streams.remove(stream)
                elif stream is self.errors:
                    self._err = (self._err + data)[-_KEPT:]
                else:
                    self._out = (self._out + data)[-_KEPT:]
            if self.output in ready and self.output in streams:
                return True
        return False

    def _why_ended(self) -> str:
        code, text = self.process.wait(), self._err.decode(errors="replace")
        why = _last_line(text)
        if code == _NO_CONNECTION:
            remedy = next((remedy for words, remedy in _REMEDIES.items() if words in text), None)
            if remedy is not None:
                return remedy.format(host=self.host, why=why)
            return f"it can't be reached ({why}); `ssh {self.host} true` has to work without a question"
        if code in (_NOT_THERE, _NOT_EXECUTABLE):
            return f"{self._program} is not there ({why}); install Lockstep there, or give its path with --program"
        lines = "; ".join(line.strip() for line in text.splitlines()[-_MOST_LINES:])
        return f"{self._program} has ended with {code}: {lines}; it needs a Lockstep that can be launched by ssh"


def ssh_words(host: str, options: Sequence[str], program: str) -> tuple[str, ...]:
    """Return the command line of ssh to a host."""
    return ("ssh", *options, *SSH_OPTIONS, "--", host, f"{program} launch ssh at-host")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ssh: ") if lines else ""
