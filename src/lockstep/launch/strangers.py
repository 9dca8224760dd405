"""Admits to a launcher who knows the job's token; others are refused and noted, and few of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep.launch.host_protocol import NotAuthorized, NotLauncher, welcome

_UNPROVEN, _UNPROVEN_OF_HOST = 4096, 1024  # connections without a proof of the token, of all and of an address
_REFUSALS = 16  # addresses that are reported


class Doorkeeper:
    """Lets those in who know the job's token.

    Args:
        note: Called with what the user should know.
    """

    def __init__(self, key: bytes, note: Callable[[str], None]) -> None:
        self._key = key
        self._note = note
        self._refused: set[str] = set()
        self._unproven: dict[asyncio.StreamWriter, str] = {}  # the oldest first

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Return what the other side wants, once it has proven the token; empty: it hasn't."""
        self._limit(writer)
        try:
            return await welcome(reader, writer, self._key)
        except (NotAuthorized, NotLauncher) as error:
            self._note_refusal(address_of(writer), error)
            return b""
        finally:
            self._unproven.pop(writer, None)

    def _limit(self, writer: asyncio.StreamWriter) -> None:
        """Note a connection, and end the oldest of those whose address holds too many without a proof."""
        self._unproven[writer] = address_of(writer)
        same = [other for other, address in self._unproven.items() if address == address_of(writer)]
        if len(same) > _UNPROVEN_OF_HOST or len(self._unproven) > _UNPROVEN:
            oldest = same[0] if len(same) > _UNPROVEN_OF_HOST else next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()

    def _note_refusal(self, host: str, error: Exception) -> None:
        if host not in self._refused and len(self._refused) < _REFUSALS:
            self._refused.add(host)
            reason = "has another job token" if isinstance(error, NotAuthorized) else "isn't a launcher of Lockstep"
            self._note(f"a connection from {host} was refused: it {reason}")


def address_of(writer: asyncio.StreamWriter) -> str:
    """Return the address of the other side."""
    peer = writer.get_extra_info("peername")
    return str(peer[0]).removeprefix("::ffff:") if peer else "unknown"
