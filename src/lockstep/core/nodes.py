"""The number of hosts, `4` or `2:4` (MIN:MAX), and the address where they meet."""

from __future__ import annotations

import re

_RANGE = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


def checked_nodes(nodes: int | str) -> int | str:
    """Return a number or a range of hosts. Raises ValueError."""
    if isinstance(nodes, int):
        return nodes
    if (match := _RANGE.fullmatch(nodes)) is None:
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


def checked_address(address: str) -> str:
    """Return an address HOST:PORT. Raises ValueError."""
    split_address(address)
    return address


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; an IPv6 host without its brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)
