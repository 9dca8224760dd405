"""Serves the snapshots in a host's memory to the ranks and launchers of the other hosts, who have proven the job token.

{"parts": null}                                                  -->   {"parts": [...]}, as of `host_parts`
{"open": ["checkpoints", "step-00000470", "manifest.json"]}      -->   {"size": 4711} or {"error": "..."}
{"read": [0, 4711]}                                              -->   the bytes of that file, as they are
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lockstep.checkpoint.host_parts import COPIES, OWN, HostPart, parts_in
from lockstep.launch.host_protocol import (
    MEMORY,
    Link,
    Message,
    NotAuthorized,
    NotLauncher,
    framed,
    introduce_on,
    receive_into,
    received,
)

_FILE = re.compile(r"step-[0-9]+/[a-z0-9-]+\.(jsonl?|safetensors)|reports(-before)?\.jsonl")
_ANSWER_S = 10.0  # that the other side waits for an answer
_CHUNK_BYTES = 2**20

Address = tuple[str, int]


class MemoryServer:
    """Serves the memory of one host, once that is known."""

    def __init__(self) -> None:
        self._folder: asyncio.Future[Path] = asyncio.get_running_loop().create_future()

    def open(self, folder: Path) -> None:
        """Serve this folder from now on."""
        if not self._folder.done():
            self._folder.set_result(folder)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until it ends."""
        link, file = Link(reader, writer), -1
        try:
            folder = await asyncio.shield(self._folder)
            while True:
                match await link.receive():
                    case {"parts": _}:
                        link.send({"parts": [json.loads(part.encoded()) for part in parts_in(folder)]})
                    case {"open": [str(place), str(name)]}:
                        file = _closed(file)
                        try:
                            file = _opened(folder, place, name)
                            link.send({"size": os.fstat(file).st_size})
                        except OSError as error:
                            link.send({"error": error.strerror or str(error)})
                    case {"read": [int(offset), int(size)]}:
                        await _send(writer, file, offset, size)
                    case _:
                        return
                await writer.drain()
        except OSError:  # the other side has gone; or the file ends too early, which it notices
            pass
        finally:
            _closed(file)


def _opened(folder: Path, place: str, name: str) -> int:
    """Open a file of a snapshot, or of reports. Raises OSError."""
    if place not in ("", OWN, COPIES) or not _FILE.fullmatch(name):
        raise FileNotFoundError("there is no such file")
    file = os.open(folder / place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError("it is not a file")
    return file


def _closed(file: int) -> int:
    if file >= 0:
        os.close(file)
    return -1


async def _send(writer: asyncio.StreamWriter, file: int, offset: int, size: int) -> None:
    end = offset + size
    while offset < end:
        data = os.pread(file, min(_CHUNK_BYTES, end - offset), offset)
        if not data:
            raise OSError("the file ends")
        writer.write(data)
        await writer.drain()
        offset += len(data)


# --- the other side -------------------------------------------------------------------------------------------------


class RemoteMemory:
    """A connection to the memory of another host. All methods raise OSError if it can't be reached any more."""

    def __init__(self, address: Address, key: bytes) -> None:
        self._connection = socket.create_connection(address, _ANSWER_S)
        try:
            introduce_on(self._connection, key, MEMORY)
        except (NotAuthorized, NotLauncher):
            self._connection.close()
            raise ConnectionRefusedError(f"what listens on {address[0]}:{address[1]} refuses the job token") from None
        except OSError:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def parts(self) -> list[HostPart]:
        """Return the parts of snapshots that it has."""
        answer = self._asked({"parts": None})
        with suppress(ValueError, TypeError, KeyError):
            return [HostPart.of(fields) for fields in answer["parts"]]
        raise ConnectionError("it sent what is no list of parts")

    def open(self, place: str, name: str) -> int:
        """Open a file for `read`; return its size. Raises OSError, also if it doesn't exist."""
        answer = self._asked({"open": [place, name]})
        if "size" not in answer:
            raise OSError(str(answer.get("error", "there is no such file")))
        return int(answer["size"])

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the open file's bytes from `offset`."""
        if into:
            self._connection.sendall(framed({"read": [offset, len(into)]}))
            receive_into(self._connection, into)

    def close(self) -> None:
        self._connection.close()

    def _asked(self, request: Message) -> dict[str, Any]:
        self._connection.sendall(framed(request))
        size = int.from_bytes(received(self._connection, 4), "big")
        try:
            answer: dict[str, Any] = json.loads(received(self._connection, size))
        except ValueError:
            raise ConnectionError("it sent what is no answer") from None
        return answer
