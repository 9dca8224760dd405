"""The process of `launch ssh` and `launch ray` on each host: answers questions about it, then runs the command there.

    terminal   ssh -- requests, lines of JSON --> stdin  this process -- starts --> lockstep train ...
    or driver  <-- replies; then the output -- stdout, stderr

It reads stdin as long as the command runs. When stdin ends, or nothing has come for some time, the terminal or the
network is gone: the command gets SIGTERM, saves and stops, and what is left after `grace` seconds is killed.

A launcher that is killed, as by the kernel for memory, is started again, and joins the run's next round.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from lockstep.core.interfaces import outside_addresses
from lockstep.core.stopping import SAVE_SIGNAL, die_with_parent, handled_signals
from lockstep.core.terminal import echo
from lockstep.launch.meeting import versions

REPLY = "lockstep-host: "
"""Begins a line with a reply; other lines come from the shell's start files."""
BEAT_S = 5.0
SILENCE_S = 60.0  # after which the terminal counts as gone

_CHUNK = 1 << 16
_CONNECT_S = 3.0
_LAST_OUTPUT_S = 5.0
_SOON_S = 60.0  # a launcher that is killed later than that counts as one that has worked
_MOST_TIMES = 3  # in a row
_LONGEST_REQUEST = 16 << 20

Message = Mapping[str, Any]


def serve() -> int:
    """Answer requests from stdin until one starts the command; return its exit code."""
    requests, host = _Requests(), _Questions()
    try:
        while (request := requests.next(SILENCE_S)) is not None:
            if request["do"] == "start":
                host.clear({})
                return _run(request, requests)
            if request["do"] != "beat":
                _reply(host.answer(request))
    finally:
        host.clear({})
    return 0


class _Requests:
    """Lines of JSON on stdin."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._rest = b""

    def next(self, seconds: float) -> Message | None:
        """Wait for a request; None: stdin has ended, or nothing has come."""
        until = time.monotonic() + seconds
        while not self._lines:
            ready, _, _ = select.select([0], [], [], max(0.0, until - time.monotonic()))
            if not ready or not self.read():
                return None
        return self.taken()[0]

    def read(self) -> bool:
        """Read what there is; return False at the end."""
        data = os.read(0, _CHUNK)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += lines
        return bool(data) and len(self._rest) < _LONGEST_REQUEST

    def taken(self, *, everything: bool = False) -> list[Message]:
        """Return and forget the first request that has been read, or all."""
        number = len(self._lines) if everything else 1
        lines, self._lines = self._lines[:number], self._lines[number:]
        return [json.loads(line) for line in lines]


def _reply(answer: Message) -> None:
    os.write(1, f"{REPLY}{json.dumps(answer)}\n".encode())


# --- questions ------------------------------------------------------------------------------------------------------


class _Questions:
    """Questions of the terminal before it starts anything; each is a method."""

    def __init__(self) -> None:
        self._marks: list[Path] = []
        self._listener: socket.socket | None = None

    def answer(self, request: Message) -> Message:
        ask = {"look": self.look, "listen": self.listen, "reach": self.reach, "mark": self.mark, "see": self.see}
        try:
            return {**ask, "clear": self.clear}[request["do"]](request)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            return {"problem": f"{place}{error.strerror or error}"}

    def look(self, request: Message) -> Message:
        """Enter the working folder and return facts about this host."""
        folder = request["folder"]
        try:
            os.chdir(folder)
        except OSError as error:
            return {"problem": f"its working folder {folder} can't be entered ({error.strerror}); make or share it, or "
                    "give --folder"}  # fmt: skip
        try:
            known = versions()
        except PackageNotFoundError as error:
            return {"problem": f"{error.name} is not installed for {sys.executable}; install it there"}
        served_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        addresses = dict.fromkeys([*served_at, *outside_addresses()])
        return {"name": socket.gethostname(), "versions": known, "addresses": list(addresses)}

    def listen(self, request: Message) -> Message:
        """Listen on all interfaces, and send each who connects the request's nonce."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        dual = family == socket.AF_INET6
        self._listener = socket.create_server(("", request["port"]), family=family, dualstack_ipv6=dual, backlog=1024)
        threading.Thread(target=_send_nonce, args=(self._listener, request["nonce"]), daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def reach(self, request: Message) -> Message:
        """Return those addresses at which the host that listens is reached, and not another one."""
        return {"reached": [each for each in request["addresses"] if _reaches(each, request["port"], request["nonce"])]}

    def mark(self, request: Message) -> Message:
        """Write an empty file into each folder, or the nearest one above it that exists, and return their paths."""
        for folder in request["folders"]:
            path = Path(folder).absolute()
            near = next(each for each in (path, *path.parents) if each.is_dir())
            self._marks.append(near / f".lockstep-shared-{request['nonce']}")
            self._marks[-1].touch()
        return {"marks": [str(path) for path in self._marks]}

    def see(self, request: Message) -> Message:
        """Return which of these files aren't seen here."""
        return {"missing": [number for number, path in enumerate(request["marks"]) if not Path(path).exists()]}

    def clear(self, request: Message) -> Message:
        """Remove what the questions have left."""
        for path in self._marks:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._marks, self._listener = [], None
        return {}


def _send_nonce(listener: socket.socket, nonce: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.sendall(nonce.encode())


def _reaches(address: str, port: int, nonce: str) -> bool:
    received = b""
    with suppress(OSError), socket.create_connection((address, port), _CONNECT_S) as connection:
        while len(received) < len(nonce) and (data := connection.recv(len(nonce))):
            received += data
    return received == nonce.encode()


# --- the command ----------------------------------------------------------------------------------------------------


def _run(order: Message, requests: _Requests) -> int:
    """Start the command, again if it is killed, and return its exit code once nothing is left of it."""
    words, times = order["words"], 0
    while True:
        began = time.monotonic()
        code, is_over = _run_once(words, order, requests)
        times = times + 1 if time.monotonic() - began < _SOON_S else 1
        if code >= 0 or is_over or times > _MOST_TIMES:
            return code if code >= 0 else 128 - code
        name = signal.Signals(-code).name
        text = f"lockstep: the launcher on {socket.gethostname()} was killed by {name}; it is started again"
        echo(text, file=sys.stderr, flush=True)
        words = order["restart_words"]  # which resume what has begun


def _run_once(words: Sequence[str], order: Message, requests: _Requests) -> tuple[int, bool]:
    """Run the command in a session of its own.

    Returns:
        Its exit code; negative: the signal that has killed it. And whether it was to end.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **order["environment"]},
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    assert child.stdout is not None
    assert child.stderr is not None
    pairs = [(child.stdout.fileno(), 1), (child.stderr.fileno(), 2)]
    pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in pairs]
    for pump in pumps:
        pump.start()
    stops: list[int] = []

    def stop(number: int, frame: object = None) -> None:
        stops.append(number)
        child.send_signal(number)

    with handled_signals(stop, lambda number, _: child.send_signal(number)):
        is_gone = _watch(child, requests, order["grace"], stop)
    for pump in pumps:
        pump.join(_LAST_OUTPUT_S)
    return child.returncode, is_gone or bool(stops)


def _watch(child: subprocess.Popen[bytes], requests: _Requests, grace: float, stop: Callable[[int], None]) -> bool:
    """Pass signals on until the command has ended, and end it if the terminal is gone; return whether it is."""
    ended = os.pidfd_open(child.pid)
    heard, killed_at, is_gone = time.monotonic(), float("inf"), False
    while True:
        until = killed_at if is_gone else heard + SILENCE_S
        ready, _, _ = select.select([ended] if is_gone else [ended, 0], [], [], max(0.0, until - time.monotonic()))
        if ended in ready or (is_gone and not ready):
            break
        if ready and requests.read():
            heard = time.monotonic()
            for request in requests.taken(everything=True):
                if request["do"] == "signal":
                    number = request["number"]
                    child.send_signal(number) if number == SAVE_SIGNAL else stop(number)
        else:
            child.send_signal(signal.SIGTERM)
            killed_at, is_gone = time.monotonic() + grace, True
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its id isn't given away before it is waited for
    child.wait()
    os.close(ended)
    return is_gone


def _pump(source: int, target: int) -> None:
    """Copy output; without a reader it is discarded, because the command has yet to save."""
    while data := os.read(source, _CHUNK):
        with suppress(OSError):
            while data:
                data = data[os.write(target, data) :]
