"""The ranks of all hosts that wait in collectives, as their launchers report it to each other.

    host a   its ranks have waited for a while --> reported to all --.-- all ranks wait, in collectives that differ
    host b   its ranks have waited for a while --> reported to all --'-- the host of the odd one kills it

A host withdraws its report once one of its ranks moves. While the collectives are the same, the network may be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.launch.hang_report import Wait


class HostWaits:
    """The waits that this host has reported, and those of the others.

    Args:
        send: Sends a message to the launchers of all other hosts.
        ranks: Returns the number of ranks on all hosts.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None], ranks: Callable[[], int]) -> None:
        self._send, self._ranks = send, ranks
        self._own: tuple[Wait, ...] = ()
        self._others: dict[int, tuple[Wait, ...]] = {}

    def clear(self) -> None:
        """Forget the round that has ended."""
        self._own, self._others = (), {}

    def report(self, waits: Sequence[Wait]) -> None:
        """Report that all ranks of this host wait; none: that they don't any more."""
        if tuple(waits) != self._own:
            self._own = tuple(waits)
            self._send({"type": "waits", "ranks": [tuple(wait) for wait in waits]})

    def receive(self, message: Mapping[str, Any]) -> None:
        """Note what another host's launcher has reported."""
        self._others[message["node"]] = tuple(Wait(*fields) for fields in message["ranks"])

    def mismatched(self) -> tuple[Wait, ...]:
        """Return the waits of all ranks if each is in one and they aren't in the same; else none."""
        waits = sorted(wait for each in (self._own, *self._others.values()) for wait in each)
        same = len({(wait.operation, wait.calls) for wait in waits}) <= 1
        return () if same or len(waits) < self._ranks() else tuple(waits)
