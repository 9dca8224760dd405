"""The number of a run's hosts: `4`, or `2:4` for a run that continues while at least two of four are there."""

from __future__ import annotations

import re

_RANGE = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


def checked_nodes(nodes: int | str) -> int | str:
    """Return a number or a range of hosts as it is. Raises ValueError with the nearest right value."""
    if isinstance(nodes, int):
        return nodes
    match = _RANGE.fullmatch(nodes)
    if match is None:
        raise ValueError(f"{nodes!r} is neither a number of hosts such as 4, nor MIN:MAX such as 2:4")
    least, most = int(match[1]), int(match[2])
    if least == most:
        raise ValueError(f"{nodes} is {most}; write {most}")
    if least > most:
        raise ValueError(f"{nodes} ends below its beginning; write {most}:{least}")
    return nodes


def node_range(nodes: int | str) -> tuple[int, int]:
    """Return the least and the largest number of hosts."""
    if isinstance(nodes, int):
        return nodes, nodes
    least, _, most = nodes.partition(":")
    return int(least), int(most)


def is_elastic(nodes: int | str) -> bool:
    """Return whether the run continues with fewer hosts than it may have."""
    return not isinstance(nodes, int)
