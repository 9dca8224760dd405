"""A machine of the same network, which doesn't know the job's token, connects to all ports of a run's hosts."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from kit.commands import Running
from kit.hosts import needs_hosts, network
from kit.waiting import UNHURRIED
from kit.worlds import served

from lockstep.launch.channel import _proof, job_key, join, store_of

RUN = (
    "train", "digits", "run.steps=100000", "launch.device=cpu", "monitor.every=1", "run.folder=run",
    "checkpoint.every=5", "evaluation.at_end=false", "--ranks", 1, UNHURRIED,
    "model.layers=1", "model.width=8",
)  # fmt: skip
GREETING = 48  # bytes
STORE = store_of(1)
CALL = b"LOCKSTEP-HOSTS-2\r\n\r\n"
TOKEN = "a token that the stranger doesn't know"
HELD = 1100  # connections with half a handshake, which are kept open


def updates(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def open_ports() -> list[int]:
    """TCP ports on which something in this network namespace listens, but on loopback."""
    listing = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    addresses = [line.split()[3].rpartition(":")[::2] for line in listing.splitlines()]
    return sorted({int(port) for address, port in addresses if not address.startswith(("127.", "[::1]"))})


def scan(result: Path) -> None:
    result.write_text(json.dumps(open_ports()))


def answer_to(data: bytes, address: tuple[str, int]) -> bytes:
    """What comes after the greeting, until the other side closes."""
    with socket.create_connection(address, 5) as connection:
        connection.settimeout(15)
        connection.sendall(data)
        received = b""
        while len(received) < 1 << 16:
            try:
                more = connection.recv(4096)
            except OSError:
                break
            if not more:
                break
            received += more
    return received[GREETING:]


def proofs(address: tuple[str, int]) -> Iterator[tuple[str, bytes]]:
    """Handshakes of one who has listened to another connection, who has another token, or none at all."""
    with socket.create_connection(address, 5) as connection:
        heard = connection.recv(GREETING, socket.MSG_WAITALL)[16:]
        own = secrets.token_bytes(32)
        replayed = CALL + own + STORE + _proof(job_key(TOKEN, ""), b"joins", STORE, heard + own)
        other = CALL + own + STORE + _proof(job_key("another", ""), b"joins", STORE, heard + own)
        yield "replayed", replayed
        yield "other token", other
    yield "no token", CALL + own + STORE + bytes(32)
    yield "4 GiB", b"\xff\xff\xff\xff" + bytes(100_000)
    yield "garbage", secrets.token_bytes(100_000)
    yield "http", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100)


def attack(rendezvous: tuple[str, int], others: list[tuple[str, int]], result: Path) -> None:
    """Try all of it, and write the answers; half-open connections are kept until this process ends."""
    held = []
    for _ in range(HELD):
        held.append(socket.create_connection(rendezvous, 5))
        held[-1].sendall(b"half a handshake")
    answers = {name: answer_to(data, rendezvous).hex() for name, data in proofs(rendezvous)}
    for address in others:
        for data in (secrets.token_bytes(1000), b"\xff" * 100, b""):
            with socket.create_connection(address, 5) as connection:
                connection.sendall(data)
        held.append(socket.create_connection(address, 5))
    result.write_text(json.dumps(answers))
    time.sleep(1.0)


@needs_hosts
@pytest.mark.skipif(sys.platform != "linux", reason="ss")
def test_a_stranger_on_the_network_is_refused_at_every_port_and_disturbs_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with network(3, tmp_path) as net:

        def on(host: int, function: partial[None]) -> None:
            process = served().Process(target=partial(net.run, host, function))
            process.start()
            process.join(60)
            assert process.exitcode == 0

        words = (*RUN, "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500")
        launched: list[Running] = [net.start(host, *words, cwd=tmp_path, LOCKSTEP_JOB_TOKEN=TOKEN) for host in (0, 1)]
        launched[0].wait_for(lambda: updates(run) > 5)
        for host in range(2):
            on(host, partial(scan, tmp_path / f"ports-{host}"))
        ports = [json.loads((tmp_path / f"ports-{host}").read_text()) for host in range(2)]
        assert 29500 in ports[0]
        assert [len(each) for each in ports] == [2, 1], "the relay that leads, and gloo of each rank"
        others = [(net.address(host), port) for host in range(2) for port in ports[host] if port != 29500]
        on(2, partial(attack, (net.address(0), 29500), others, tmp_path / "answers"))
        before = updates(run)
        launched[0].wait_for(lambda: updates(run) > before + 5)
        launched[1].send(signal.SIGINT)
        assert [each.end() for each in launched] == [75, 75], launched[0].output + launched[1].output
    answers = json.loads((tmp_path / "answers").read_text())
    assert {name: answer for name, answer in answers.items() if answer != (b"-" + bytes(32)).hex()} == {}
    assert launched[0].output.count("note: a connection from 10.77.0.3 was refused") == 1


def test_a_connection_is_passed_on_whole_at_the_pace_of_its_reader() -> None:
    size = 30_000_000
    received, waiting = asyncio.run(_passed_on(size))
    assert received == size
    assert waiting < size / 2, "the sender waits for the reader"


async def _passed_on(size: int) -> tuple[int, int]:
    """Send through two joined connections to a slow reader; return the bytes read, and those sent before that."""
    loop = asyncio.get_running_loop()
    sent = 0

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(size // 100_000):
            writer.write(bytes(100_000))
            await writer.drain()
            sent += 100_000
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join((reader, writer), await asyncio.open_connection(*source.sockets[0].getsockname()))

    source = await asyncio.start_server(send, "127.0.0.1", 0)
    middle = await asyncio.start_server(accept, "127.0.0.1", 0)
    with socket.create_connection(middle.sockets[0].getsockname()) as connection:
        connection.setblocking(False)
        await asyncio.sleep(0.3)
        before, received = sent, 0
        while data := await loop.sock_recv(connection, 1 << 20):
            received += len(data)
    return received, before
