"""The protocol between the launchers of several hosts: who may connect, and how messages look.

    leader   LOCKSTEP-HOSTS-2, a nonce        -->
             <--   LOCKSTEP-HOSTS-2, two ends of line: what waits for a request, as HTTP does, refuses it at once
             <--   a nonce, what it wants ("h": to join as a host, "s": the ranks' store), the number of its round,
                   a proof of the token
             "+", a proof of the token        -->                             or "-": refused
             then frames: 4 bytes of length, JSON          or, for the store, its bytes as they are

A proof is HMAC-SHA256 of both nonces under the job's token, which itself is never sent. What is sent afterwards is
neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

HOST = b"h\0\0\0\0"
HEARTBEAT_S = 1.0
SILENCE_S = 10.0  # after which a host counts as cut off: TCP needs 7.4 s to get through after an outage of 5 s
SHORT_SILENCE_S = 5.0  # the same where ranks start again: then it costs a round, not the run
_HANDSHAKE_S = 10.0
_MAGIC = b"LOCKSTEP-HOSTS-2"
_CALL = _MAGIC + b"\r\n\r\n"
_SHOWN = 60  # characters of what another program sends
_NONCE = _PROOF = 32
_WANTS = len(HOST)
_MAX_FRAME = 16 << 20

Message = dict[str, Any]


class NotAuthorized(Exception):
    """The other side doesn't know the job's token."""


class NotLauncher(Exception):
    """The other side isn't a launcher of Lockstep; the text is the start of what it sends."""


def store_of(number: int) -> bytes:
    """Return what asks for the store of a round's ranks: another round's is refused."""
    return b"s" + number.to_bytes(_WANTS - 1, "big")


class Link:
    """A connection over which messages are sent and received."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, message: Message) -> None:
        """Send a message, later if the connection is slow; a broken connection is noticed by `receive`."""
        if not self.writer.is_closing():
            self.writer.write(framed(message))

    async def receive(self, limit: float | None = None) -> Message:
        """Return the next message.

        Args:
            limit: Seconds to wait for it.

        Raises:
            OSError: The connection is closed or broken (ConnectionError), or nothing came (TimeoutError).
        """
        try:
            async with asyncio.timeout(limit):
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                if size > _MAX_FRAME:
                    raise ConnectionError("it sent what is no message")
                message: Message = json.loads(await self._reader.readexactly(size))
                return message
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionError("it closed its connection") from error

    def close(self) -> None:
        self.writer.close()


def framed(message: Message) -> bytes:
    """Return a message as it is sent, also by `multiprocessing.connection.Connection`."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> bytes:
    """Let the other side prove that it knows the token; return what it wants.

    Raises:
        NotAuthorized: It doesn't know the token.
        NotLauncher: It sends something else, or nothing.
    """
    own = secrets.token_bytes(_NONCE)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            writer.write(_MAGIC + own)
            call = await reader.readexactly(len(_CALL))
            answer = await reader.readexactly(_NONCE + _WANTS + _PROOF)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NotLauncher from error
    if call != _CALL:
        writer.write(b"-" + bytes(_PROOF))
        raise NotLauncher
    nonces, wants = own + answer[:_NONCE], answer[_NONCE : _NONCE + _WANTS]
    if not hmac.compare_digest(answer[_NONCE + _WANTS :], _proof(key, b"joins", wants, nonces)):
        writer.write(b"-" + bytes(_PROOF))
        raise NotAuthorized
    writer.write(b"+" + _proof(key, b"leads", wants, nonces))
    return wants


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, wants: bytes) -> None:
    """Prove to the leader that this side knows the token, and have it prove the same.

    Raises:
        NotAuthorized: One side doesn't know the other's token.
        NotLauncher: Another program listens there.
        OSError: The connection broke, or nothing came.
    """
    own = secrets.token_bytes(_NONCE)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            greeting = b""
            writer.write(_CALL)
            while len(greeting) < len(_MAGIC) + _NONCE:
                data = await reader.read(len(_MAGIC) + _NONCE - len(greeting))
                greeting += data
                if not data:
                    raise ConnectionError("it closed its connection")
                if not greeting.startswith(_MAGIC[: len(greeting)]):
                    raise NotLauncher(_shown(greeting))
            nonces = greeting[len(_MAGIC) :] + own
            writer.write(own + wants + _proof(key, b"joins", wants, nonces))
            answer = await reader.readexactly(1 + _PROOF)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("it closed its connection") from error
    if not hmac.compare_digest(answer, b"+" + _proof(key, b"leads", wants, nonces)):
        raise NotAuthorized


def _shown(data: bytes) -> str:
    """Return the first line that another program has sent, as far as it is text."""
    text = data.decode(errors="replace").strip().partition("\n")[0].strip()[:_SHOWN]
    return text if text.isprintable() and "\ufffd" not in text else ""


def job_key(token: str, job_id: str) -> bytes:
    """Return the key of proofs: the job's token, or without one its id, which is no secret."""
    return hashlib.sha256(f"lockstep job\0{token}\0{job_id}".encode()).digest()


def _proof(key: bytes, role: bytes, wants: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + wants + nonces, "sha256")
