"""The actor that Ray places on each node: starts Lockstep's launcher there, and hands on its output and signals.

Ray sends this module to the nodes by value, so it imports only the standard library: Ray's own Python there needs no
Lockstep.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress

_CHUNK = 1 << 20
_WAIT_S = 1.0
_PAUSE_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class NodeProcess:
    """Lockstep's launcher on this node. Without its actor it gets SIGTERM, and saves before it stops."""

    def free_port(self) -> int:
        """Return a port of this node that nothing listens on."""
        with socket.create_server(("", 0)) as free:
            return int(free.getsockname()[1])

    def start(self, words: list[str], environment: dict[str, str], folder: str | None) -> str:
        """Start the command in a folder; return why that can't be done, or an empty text."""
        variables = {**os.environ, **environment}
        if "OMP_NUM_THREADS" not in environment:
            variables.pop("OMP_NUM_THREADS", None)  # Ray's, as if all ranks were one process
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the actor
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=variables,
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # it ends with the actor
            )
        except OSError as error:
            return f"{error.filename} can't be started or entered: {error.strerror}"
        return ""

    def poll(self, place: int) -> tuple[bytes, int | None]:
        """Return output from a place on, and the exit code once there is no more; wait a moment for something new."""
        until = time.monotonic() + _WAIT_S
        while True:
            code = self._process.poll()
            data = os.pread(self._output.fileno(), _CHUNK, place)
            if data or code is not None or time.monotonic() > until:
                return data, None if data else code
            time.sleep(_PAUSE_S)

    def signal(self, number: int) -> None:
        """Send the launcher a signal; SIGKILL ends all that it has started, too."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number) if number == signal.SIGKILL else self._process.send_signal(number)
