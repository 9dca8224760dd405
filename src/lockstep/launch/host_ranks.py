"""The hosts of a round, and which ranks each has: `host a (ranks 0 to 3), host b (ranks 4 and 5)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import named_ranks


@dataclass(frozen=True, slots=True)
class HostRanks:
    """A host of the run, and its ranks: `first`, `first + 1`, ..."""

    name: str
    first: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.name} ({named_ranks(self.span)})"

    @property
    def span(self) -> range:
        return range(self.first, self.first + self.ranks)


def in_order(hosts: Sequence[Mapping[str, Any]]) -> list[HostRanks]:
    """Return the hosts of a round, with `host` and `ranks` of each by node rank, and the ranks of each."""
    placed: list[HostRanks] = []
    for host in hosts:
        first = placed[-1].span.stop if placed else 0
        placed.append(HostRanks(host["host"], first, host["ranks"]))
    return placed
