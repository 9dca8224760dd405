"""The ranks of all hosts that wait in collectives, as their launchers report it to each other.

    host a   its ranks have waited for a while --> reported to all --.-- all ranks wait, in collectives that differ
    host b   its ranks have waited for a while --> reported to all --'-- the host of the odd one kills it

A host withdraws its report once one of its ranks moves. While the collectives are the same, the network may be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.core.pending_collective import PendingCollective
from lockstep.launch.hang_report import Wait, are_recorded


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
        waits = (Wait(*fields) for fields in message["ranks"])
        self._others[message["node"]] = tuple(
            wait if wait.pending is None else wait._replace(pending=PendingCollective(*wait.pending)) for wait in waits
        )

    def mismatched(self) -> tuple[Wait, ...]:
        """Return the waits of all ranks if each is in one, and two wait for each other in different ones; else none."""
        waits = sorted((wait for each in (self._own, *self._others.values()) for wait in each), key=lambda w: w.rank)
        return tuple(waits) if len(waits) >= self._ranks() and _differ(waits) else ()


def _differ(waits: Sequence[Wait]) -> bool:
    """Return whether ranks wait for each other in different collectives."""
    if not are_recorded(waits):
        return len({(wait.operation, wait.calls) for wait in waits}) > 1
    calls = {wait.rank: wait.pending.call for wait in waits if wait.pending is not None}
    groups = {wait.pending.call: {*wait.pending.ranks} for wait in waits if wait.pending is not None}
    waiting: dict[tuple[str, int, str], set[int]] = {}
    for rank, call in calls.items():
        waiting.setdefault(call, set()).add(rank)
    return any(
        ranks & groups[calls[other]]
        for call, ranks in waiting.items()
        for other in (groups[call] - ranks) & calls.keys()
    )
