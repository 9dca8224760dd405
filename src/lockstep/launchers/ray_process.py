"""Lockstep's process on a node of a Ray cluster: pipes here, an actor there.

stdin  --> a thread calls actor.write     stdout, stderr <-- a thread calls actor.read
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from contextlib import suppress
from typing import IO, Any

from lockstep.launchers.host_connection import last_line

_CHUNK = 1 << 16
_READ_S = 5.0
_UNREACHABLE_S = 30.0
_DYING_S = 5.0  # from the first killed process of a node to the last
_RETRY_S = 0.5
_MOST_LINES = 3
_NOT_THERE = 127  # of a program that can't be started


class RayProcess:
    """The process that a `ray_node.NodeProcess` runs.

    Args:
        actor: A handle of it.
        program: How Lockstep is started there, for messages.
    """

    def __init__(self, actor: Any, program: str) -> None:
        self._actor = actor
        self._program = program
        self._lost: str | None = None
        self._code = 1
        requests, self._stdin = _pipe()
        self._stdout, output = _pipe()
        self._stderr, errors = _pipe()
        threading.Thread(target=self._feed, args=(requests,), daemon=True).start()
        self._reader = threading.Thread(target=self._drain, args=(output, errors), daemon=True)
        self._reader.start()

    @property
    def stdin(self) -> IO[bytes]:
        return self._stdin

    @property
    def stdout(self) -> IO[bytes]:
        return self._stdout

    @property
    def stderr(self) -> IO[bytes]:
        return self._stderr

    def wait(self) -> int:
        """Return its exit code; 1 if its node is lost."""
        self._reader.join()
        return self._code

    def kill(self) -> None:
        """End the process, and the command with it."""
        self._actor.kill.remote()

    def why_lost(self, errors: str) -> str | None:
        """Return why the actor has gone; None: the process has ended by itself."""
        return self._lost

    def why_ended(self, errors: str) -> str:
        """Return why the process has ended without an answer, with a remedy."""
        code = self.wait()
        if self._lost is not None:
            return self._lost
        if code == _NOT_THERE:
            return (
                f"{self._program} is not there ({last_line(errors)}); install Lockstep there, or give its path with "
                "--program"
            )
        lines = "; ".join(line.strip() for line in errors.splitlines()[-_MOST_LINES:])
        return f"{self._program} has ended with {code}: {lines}; it needs a Lockstep that can be launched by Ray"

    def _feed(self, requests: IO[bytes]) -> None:
        import ray

        with suppress(ray.exceptions.RayError):  # the other thread reports it
            for number in itertools.count():
                data = os.read(requests.fileno(), _CHUNK)
                self._call("write", number, data)
                if not data:
                    break
        requests.close()

    def _drain(self, output: IO[bytes], errors: IO[bytes]) -> None:
        import ray

        targets, places, has_ended = {1: output, 2: errors}, {1: 0, 2: 0}, False
        while not has_ended:
            try:
                new, has_ended, code = self._call("read", _READ_S, places)
            except ray.exceptions.RayError as error:
                self._lost = _reason(error)
                break
            for number, data in new.items():
                places[number] += len(data)
                with suppress(OSError):
                    while data:
                        data = data[os.write(targets[number].fileno(), data) :]
            if has_ended and code in (None, -signal.SIGKILL):
                self._lost = self._why_killed(code)
            self._code = 1 if code is None else code if code >= 0 else 128 - code
        output.close()
        errors.close()

    def _why_killed(self, code: int | None) -> str | None:
        """Return why processes there were killed; None: Lockstep alone was, on a node that stays.

        The processes of a node that fails or is removed die one by one, and its actor may be the last.
        """
        import ray

        until = time.monotonic() + _DYING_S
        while time.monotonic() < until:
            try:
                ray.get(self._actor.is_ready.remote(), timeout=_DYING_S)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                return _reason(error)
            time.sleep(_RETRY_S)
        return "the process that started Lockstep there was killed" if code is None else None

    def _call(self, method: str, *arguments: object) -> Any:
        """Call the actor, again if its node can't be reached for a moment. Raises RayError."""
        import ray

        until = time.monotonic() + _UNREACHABLE_S
        while True:
            try:
                return ray.get(getattr(self._actor, method).remote(*arguments))
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_S)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    source, target = os.pipe()
    return open(source, "rb", 0), open(target, "wb", 0)


def _reason(error: Exception) -> str:
    """Return why an actor can't be called, without Ray's page about it."""
    text = str(error)
    if re.search(r"node (is|was|has) (dead|died|terminated|unexpectedly)|[Nn]ode.{0,40}(died|is dead|failed)", text):
        return "its node has failed or left the cluster"
    return f"Ray has ended its actor ({last_line(text)})"
