"""The actor that Ray places on each node: starts Lockstep's process there and passes its streams on.

    driver -- write --> actor --> stdin   `lockstep launch at-host`, in a session of its own
           <-- read --  actor <-- stdout, stderr, exit code

The process isn't a child of Ray's worker: when the actor is gone, its stdin ends, and the run saves before it stops.
Ray sends this module to the nodes by value, so it imports the standard library alone: Ray's own Python there needs no
Lockstep.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_CHUNK = 1 << 16
_DETACH = """\
import os, subprocess, sys
if os.fork():
    os._exit(0)
try:
    code = subprocess.call(sys.argv[2:])
except OSError as error:
    code = 127
    os.write(2, f"{error.strerror}: {error.filename}\\n".encode())
os.write(int(sys.argv[1]), b"%d" % code)
"""


class NodeProcess:
    """Lockstep's process on this node."""

    def __init__(self, words: list[str]) -> None:
        environment = dict(os.environ)
        environment.pop("OMP_NUM_THREADS", None)  # Ray's, as if all ranks were one process
        status, its_status = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DETACH, str(its_status), *words],
            0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=[its_status],
            start_new_session=True,
        )
        os.close(its_status)
        self._process.wait()  # the one that has started it
        self._changed = threading.Condition()
        self._output = {1: b"", 2: b"", status: b""}
        self._open = set(self._output)
        self._forgotten = {1: 0, 2: 0}
        self._writes = 0
        self._status = status
        for number, source in ((1, self._process.stdout), (2, self._process.stderr)):
            assert source is not None
            threading.Thread(target=self._pump, args=(number, source.fileno()), daemon=True).start()
        threading.Thread(target=self._pump, args=(status, status), daemon=True).start()

    def is_ready(self) -> bool:
        """Return that the actor is there."""
        return True

    def write(self, number: int, data: bytes) -> None:
        """Write to stdin; without data, close it.

        Args:
            number: Of the call, from 0: one that is repeated because its reply was lost has no effect.
        """
        if number < self._writes:
            return
        self._writes += 1
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError):
            if not data:
                stdin.close()
            while data:
                data = data[os.write(stdin.fileno(), data) :]

    def read(self, seconds: float, places: dict[int, int]) -> tuple[dict[int, bytes], bool, int | None]:
        """Return what is new on stdout and stderr, whether they have ended, and the exit code.

        Args:
            seconds: How long to wait for something new.
            places: By stream (1, 2), how many bytes have arrived: they are forgotten here.
        """
        with self._changed:
            for number, place in places.items():
                self._output[number] = self._output[number][place - self._forgotten[number] :]
                self._forgotten[number] = place
            self._changed.wait_for(lambda: any(self._output[number] for number in places) or not self._open, seconds)
            code = self._output[self._status]
            new = {number: self._output[number] for number in places}
            return new, not self._open, int(code) if code else None

    def kill(self) -> None:
        """End the process; the command that it has started ends with it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _pump(self, number: int, source: int) -> None:
        while data := os.read(source, _CHUNK):
            with self._changed:
                self._output[number] += data
                self._changed.notify_all()
        with self._changed:
            self._open.discard(number)
            self._changed.notify_all()
