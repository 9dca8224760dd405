"""The process of `launch ssh` on each host: `lockstep launch at-host FOLDER`, which runs the command there.

    terminal   ssh -- order, then signals and beats --> stdin  this process -- starts --> lockstep train ...
                   <-- facts about the host; then the output -- stdout, stderr

It reads stdin as long as the command runs. When stdin ends, or nothing has come for some time, the terminal or the
network is gone: the command gets SIGTERM, saves and stops, and what is left after `grace` seconds is killed.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import IO, Any, cast

from lockstep.core.interfaces import is_loopback, outside_addresses
from lockstep.core.stopping import die_with_parent, handled_signals

REPLY = "lockstep-host: "
"""Begins the line with facts; other lines come from the shell's start files."""
BEAT_S = 5.0
_SILENCE_S = 60.0  # until the terminal counts as gone
_CHUNK = 1 << 16
_LAST_OUTPUT_S = 5.0


def serve(folder: str) -> int:
    """Enter a folder, print facts about this host, run what stdin orders, and return its exit code."""
    os.write(1, f"{REPLY}{json.dumps(_facts(folder))}\n".encode())
    lines = _Lines()
    while lines.read(_SILENCE_S):
        if orders := lines.taken():
            return _run(json.loads(orders[0]), lines)
    return 0


class _Lines:
    def __init__(self) -> None:
        self._rest = b""

    def read(self, seconds: float, *others: int) -> bool:
        """Read what comes; return False at the end, or if nothing comes, or if another file is readable."""
        ready, _, _ = select.select([0, *others], [], [], seconds)
        data = os.read(0, _CHUNK) if ready == [0] else b""
        self._rest += data
        return bool(data)

    def taken(self) -> list[bytes]:
        """Return and forget the whole lines."""
        *lines, self._rest = self._rest.split(b"\n")
        return lines


def _facts(folder: str) -> Mapping[str, Any]:
    """Enter the working folder and return where other hosts reach this one: an address, and a free port."""
    try:
        os.chdir(folder)
    except OSError as error:
        why = f"its working folder {folder} can't be entered ({error.strerror})"
        return {"problem": f"{why}; make or share it, or give --folder"}
    served_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    known = [*(each for each in served_at if not is_loopback(each)), *outside_addresses(), *served_at]
    with socket.create_server(("", 0)) as free:
        return {"address": known[0] if known else "127.0.0.1", "port": free.getsockname()[1]}


def _run(order: Mapping[str, Any], lines: _Lines) -> int:
    """Run the command in a session of its own, and return its exit code once nothing is left of it."""
    words, null, pipe = [sys.executable, "-P", "-m", "lockstep", *order["words"]], subprocess.DEVNULL, subprocess.PIPE
    variables, dies = {**os.environ, **order["environment"]}, partial(die_with_parent, os.getpid())
    child = subprocess.Popen(words, 0, None, null, pipe, pipe, env=variables, start_new_session=True, preexec_fn=dies)
    pairs = [(cast("IO[bytes]", child.stdout).fileno(), 1), (cast("IO[bytes]", child.stderr).fileno(), 2)]
    pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in pairs]
    for pump in pumps:
        pump.start()

    def send(number: int, frame: object = None) -> None:
        child.send_signal(number)

    with handled_signals(send, send):
        _watch(child, lines, order["grace"], send)
    for pump in pumps:
        pump.join(_LAST_OUTPUT_S)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _watch(child: subprocess.Popen[bytes], lines: _Lines, grace: float, send: Callable[[int], None]) -> None:
    """Pass signals on until the command has ended, and end it if the terminal is gone."""
    ended = os.pidfd_open(child.pid)
    while lines.read(_SILENCE_S, ended):
        for line in lines.taken():
            if number := int(line):  # 0 is a beat
                send(number)
    if not select.select([ended], [], [], 0)[0]:
        send(signal.SIGTERM)
        select.select([ended], [], [], grace)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its id isn't given away before it is waited for
    child.wait()
    os.close(ended)


def _pump(source: int, target: int) -> None:
    """Copy output; without a reader it is discarded, because the command has yet to save."""
    while data := os.read(source, _CHUNK):
        with suppress(OSError):
            while data:
                data = data[os.write(target, data) :]
