"""The authenticated connections between the proxies of several hosts.

    leader   LOCKSTEP-HOSTS-2, a nonce        -->
             <--   LOCKSTEP-HOSTS-2, two ends of line: what waits for a request, as HTTP does, refuses it at once
             <--   a nonce, what it wants ("h": to join as a host, "s": the ranks' store), the number of its round,
                   a proof of the token
             "+", a proof of the token        -->                             or "-": refused
             then frames: 4 bytes of length, JSON          or, for the store, its bytes as they are

A proof is HMAC-SHA256 of both nonces under the job's token, which itself is never sent. What is sent afterwards is
not encrypted or signed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

LOOPBACK = "127.0.0.1"
HOST = b"h\0\0\0\0"
SILENCE_S = 10.0  # of a host that counts as cut off: TCP needs 7.4 s to get through after an outage of 5 s
SHORT_SILENCE_S = 5.0  # the same where ranks start again: then it costs a round, not the run
_HEARTBEAT_S = 1.0
_HANDSHAKE_S = 10.0
_MAGIC = b"LOCKSTEP-HOSTS-2"
_CALL = _MAGIC + b"\r\n\r\n"
_NONCE = _PROOF = 32
_WANTS = len(HOST)
_MAX_FRAME = 16 << 20
_CHUNK = 1 << 16
_UNPROVEN = 1024  # connections from one address that haven't proven the token
_REFUSALS = 16  # addresses that are reported

Message = dict[str, Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NotAuthorized(Exception):
    """The other side doesn't know the job's token."""


class NotLauncher(Exception):
    """The other side isn't a launcher of Lockstep."""


def job_key(token: str, job_id: str) -> bytes:
    """Return the key of proofs: the job's token, or without one its id, which is no secret."""
    return hashlib.sha256(f"lockstep job\0{token}\0{job_id}".encode()).digest()


def store_of(number: int) -> bytes:
    """Return what asks for the store of a round's ranks: another round's is refused."""
    return b"s" + number.to_bytes(_WANTS - 1, "big")


async def welcome(streams: Streams, key: bytes) -> bytes:
    """Let the other side prove that it knows the token; return what it wants. Raises NotAuthorized, NotLauncher."""
    reader, writer = streams
    own = secrets.token_bytes(_NONCE)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            writer.write(_MAGIC + own)
            call = await reader.readexactly(len(_CALL))
            answer = await reader.readexactly(_NONCE + _WANTS + _PROOF)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NotLauncher from error
    nonces, wants = own + answer[:_NONCE], answer[_NONCE : _NONCE + _WANTS]
    is_proven = hmac.compare_digest(answer[_NONCE + _WANTS :], _proof(key, b"joins", wants, nonces))
    if call != _CALL or not is_proven:
        writer.write(b"-" + bytes(_PROOF))
        raise NotLauncher if call != _CALL else NotAuthorized
    writer.write(b"+" + _proof(key, b"leads", wants, nonces))
    return wants


async def introduce(streams: Streams, key: bytes, wants: bytes) -> None:
    """Prove to the leader that this side knows the token, and have it prove the same.

    Raises NotAuthorized, NotLauncher; OSError if the connection broke, or nothing came.
    """
    reader, writer = streams
    own = secrets.token_bytes(_NONCE)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            greeting = b""
            writer.write(_CALL)
            while len(greeting) < len(_MAGIC) + _NONCE:
                data = await reader.read(len(_MAGIC) + _NONCE - len(greeting))
                greeting += data
                if not data:
                    raise ConnectionError("it closes the connection")
                if not greeting.startswith(_MAGIC[: len(greeting)]):
                    raise NotLauncher
            nonces = greeting[len(_MAGIC) :] + own
            writer.write(own + wants + _proof(key, b"joins", wants, nonces))
            answer = await reader.readexactly(1 + _PROOF)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("it closes the connection") from error
    if not hmac.compare_digest(answer, b"+" + _proof(key, b"leads", wants, nonces)):
        raise NotAuthorized


def _proof(key: bytes, role: bytes, wants: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + wants + nonces, "sha256")


class Doorkeeper:
    """Lets those in who know the job's token."""

    def __init__(self, key: bytes, note: Callable[[str], None]) -> None:
        self._key = key
        self._note = note
        self._refused: set[str] = set()
        self._unproven: dict[str, list[asyncio.StreamWriter]] = defaultdict(list)  # the oldest first

    async def welcome(self, streams: Streams) -> bytes:
        """Return what the other side wants, once it has proven the token; empty: it hasn't."""
        writer = streams[1]
        address = str((writer.get_extra_info("peername") or ["unknown"])[0]).removeprefix("::ffff:")
        unproven = self._unproven[address]
        unproven.append(writer)
        if len(unproven) > _UNPROVEN:
            unproven.pop(0).transport.abort()
        try:
            return await welcome(streams, self._key)
        except (NotAuthorized, NotLauncher) as error:
            if address not in self._refused and len(self._refused) < _REFUSALS:
                self._refused.add(address)
                reason = "has another job token" if isinstance(error, NotAuthorized) else "isn't a launcher of Lockstep"
                self._note(f"a connection from {address} was refused: it {reason}")
            return b""
        finally:
            if writer in unproven:
                unproven.remove(writer)


class Link:
    """A connection that sends and receives messages."""

    def __init__(self, streams: Streams) -> None:
        self._reader, self.writer = streams

    def send(self, message: Message) -> None:
        """Send a message, later if the connection is slow; a broken connection is noticed by `receive`."""
        if not self.writer.is_closing():
            text = json.dumps(message).encode()
            self.writer.write(len(text).to_bytes(4, "big") + text)  # as multiprocessing's Connection does

    async def receive(self, limit: float | None = None) -> Message:
        """Return the next message. Raises ConnectionError, or TimeoutError after `limit` seconds."""
        try:
            async with asyncio.timeout(limit):
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                if size > _MAX_FRAME:
                    raise ConnectionError("it sent an invalid message")
                message: Message = json.loads(await self._reader.readexactly(size))
                return message
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionError("it closed its connection") from error

    async def beat(self) -> None:
        """Show the other side that this one lives, until the connection ends."""
        while not self.writer.is_closing():
            self.send({"type": "beat"})
            await asyncio.sleep(_HEARTBEAT_S)


async def join(first: Streams, second: Streams) -> None:
    """Pass on what each of two connections receives to the other, until one ends."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        writer.close()

    await asyncio.gather(copy(first[0], second[1]), copy(second[0], first[1]))


class Proxy:
    """The part that proxies share. A host is lost after `silence` seconds; `place` is the rendezvous as given."""

    def __init__(self, launcher: Link, order: Message) -> None:
        self.launcher = launcher
        self.key = bytes.fromhex(order["key"])
        self.hello: Message = order["hello"]
        self.timeout: float = order["timeout"]
        self.silence: float = order["silence"]
        self.address: tuple[str, int] = (order["address"][0], order["address"][1])
        self.place = f"{order['name']}:{order['address'][1]}"
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def note(self, text: str) -> None:
        self.launcher.send({"type": "note", "text": text})

    def why_lost(self, error: OSError) -> str:
        if isinstance(error, TimeoutError) and not error.errno:
            return f"nothing has come from it for {self.silence:g} s"
        return "its connection was closed"
