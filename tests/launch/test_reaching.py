"""What a host reports that doesn't reach the launcher at the rendezvous."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from kit.commands import Running
from kit.failures import gives
from kit.hosts import needs_hosts, network
from kit.worlds import free_port

from lockstep.launch.channel import NotLauncher
from lockstep.launch.proxy import Rendezvous

RUN = ("train", "digits", "run.steps=2", "launch.device=cpu", "run.folder=run", "--ranks", 1, "--nodes", 2)


async def _notes(host: str, port: int, seconds: float) -> tuple[list[str], Exception]:
    """What is noted, and the error."""
    rendezvous, notes = Rendezvous((host, port), f"{host}:{port}", b"key"), list[str]()
    with pytest.raises((OSError, NotLauncher)) as raised:
        await rendezvous.reach(seconds, notes.append)
    return notes, raised.value


@contextmanager
def listening(*, answers: bytes | None = None) -> Iterator[int]:
    """A server that answers with these bytes and closes, or never, if there are none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def accept() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return
                if answers is not None:
                    with kept[-1] as connection:
                        connection.sendall(answers)

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


def test_a_name_that_is_not_resolved_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    notes, _ = asyncio.run(_notes("nod-0", 29500, 1.5))
    assert [gives(note, "nod-0", "Name or service not known", "1.5 s") for note in notes] == [True]


def test_nothing_that_listens_and_a_server_that_says_nothing_are_noted() -> None:
    port = free_port()
    with listening() as mute, listening(answers=b"") as closing:

        async def of_all() -> list[tuple[list[str], Exception]]:
            places = (("localhost", port), ("127.0.0.1", mute), ("127.0.0.1", closing))
            return await asyncio.gather(*(_notes(*place, 1.2) for place in places))

        of_nothing, of_mute, of_closing = asyncio.run(of_all())
    assert [gives(note, f"localhost:{port}", "1.2 s") for note in of_nothing[0]] == [True]
    assert isinstance(of_mute[1], TimeoutError)
    assert of_closing[0]


@pytest.mark.parametrize("sends", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\x00\x02\x02\x46"])
def test_another_program_is_an_error_at_once(sends: bytes) -> None:
    with listening(answers=sends) as port:
        notes, error = asyncio.run(_notes("127.0.0.1", port, 20.0))
    assert isinstance(error, NotLauncher)
    assert notes == []


def test_a_web_server_which_waits_for_a_request_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseHTTPRequestHandler, "log_message", lambda *_: None)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        begun = time.monotonic()
        notes, error = asyncio.run(_notes("127.0.0.1", server.server_port, 20.0))
        server.shutdown()
    assert isinstance(error, NotLauncher)
    assert notes == []
    assert time.monotonic() - begun < 2


@needs_hosts
def test_the_command_notes_it_in_the_first_seconds(tmp_path: Path) -> None:
    rows = [
        ("hots-0:29500", "the name hots-0 can't be resolved"),
        ("10.99.0.1:29500", "10.99.0.1:29500 isn't reached: Network is unreachable"),
    ]
    with network(2, tmp_path) as net:
        quick = {"RES_OPTIONS": "attempts:1 timeout:1"}  # no name server is there
        launched = []
        for host, (rendezvous, _) in enumerate(rows):
            folder = tmp_path / str(host)
            folder.mkdir()
            words = (*RUN, "--rendezvous", rendezvous, "launch.timeout=4")
            launched.append(net.start(host, *words, cwd=folder, **quick))
        for each, (_, reason) in zip(launched, rows, strict=True):
            each.wait_for(partial(_prints, each, f"note: {reason}"))
            assert each.lives
        assert [each.end() for each in launched] == [1, 1]
    for host, (rendezvous, reason) in enumerate(rows):
        failure = f"host host-{host} could not reach {rendezvous} within 4 s (launch.timeout): {reason}"
        assert f"lockstep: {failure}" in launched[host].output
        assert launched[host].output.count(f"note: {reason}") == 1


@needs_hosts
def test_hosts_that_wait_for_another_note_which_are_there(tmp_path: Path) -> None:
    with network(2, tmp_path) as net:
        words = (*RUN, "--nodes", 3, "--rendezvous", f"{net.address(0)}:29500", "launch.timeout=6")
        launched = [net.start(host, *words, cwd=tmp_path, LOCKSTEP_JOB_TOKEN="a token") for host in range(2)]
        where = "note: 2 of 3 hosts are at 10.77.0.1:29500: host-0, host-1"
        note = f"{where}; missing: 1 more. They are waited for up to 6 s"
        for each in launched:
            each.wait_for(partial(_prints, each, note))
        assert [each.end() for each in launched] == [1, 1]


def _prints(launched: Running, text: str) -> bool:
    return text in launched.output
