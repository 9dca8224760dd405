"""A sum of numbered terms in one order of additions, whichever ranks hold them.

    terms     0   1   2   3   4        level 0
              '-+-'   '-+-'   |        level 1: nodes (1, 0), (1, 1); a node without right neighbor moves up unchanged
                '---+---'     |        level 2
                    '----+----'        level 3: the whole

Floating-point sums are bitwise identical only if the same pairs are added. The pairs follow from the number of terms; a
rank adds those that it holds and passes on the rest, a few nodes per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of the terms from `place` x 2^level on: 2^level of them, or all that are left."""

    level: int
    place: int


class FixedSum(Generic[T]):
    """Adds values as far as they form pairs.

    Attributes:
        nodes, values: The partial sums that are held, from left to right.
    """

    def __init__(self, terms: int, add: Callable[[T, T], T]) -> None:
        self._terms = terms
        self._add = add
        self.nodes: list[Node] = []
        self.values: list[T] = []

    def put(self, node: Node, value: T) -> None:
        """Add a node to the right of all that are held."""
        self.values.append(value)
        for _ in range(_joined(self.nodes, node, self._terms)):
            right = self.values.pop()
            self.values[-1] = self._add(self.values[-1], right)


def nodes_of(first: int, stop: int, terms: int) -> list[Node]:
    """Return the nodes that remain of the terms [first, stop)."""
    nodes: list[Node] = []
    for term in range(first, stop):
        _joined(nodes, Node(0, term), terms)
    return nodes


def most_held(first: int, stop: int, terms: int) -> int:
    """Return the most values held at a time while the terms [first, stop) are added."""
    nodes: list[Node] = []
    most = 0
    for term in range(first, stop):
        most = max(most, len(nodes) + 1)
        _joined(nodes, Node(0, term), terms)
    return most


def total(nodes: Iterable[Node], values: Iterable[T], terms: int, add: Callable[[T, T], T]) -> T:
    """Return the whole sum from nodes that cover all of its terms, from left to right."""
    fixed: FixedSum[T] = FixedSum(terms, add)
    for node, value in zip(nodes, values, strict=True):
        fixed.put(node, value)
    assert len(fixed.values) == 1, f"{fixed.nodes} are not all of {terms} terms"
    return fixed.values[0]


def _joined(nodes: list[Node], node: Node, terms: int) -> int:
    """Append a node, and join the last two while they are a pair; return how often."""
    nodes.append(node)
    joined = 0
    while True:
        level, place = nodes[-1]
        if place % 2 and len(nodes) > 1 and nodes[-2] == (level, place - 1):
            nodes.pop()
            joined += 1
        elif place % 2 or place == 0 or (place + 1) << level < terms:
            return joined
        nodes[-1] = Node(level + 1, place // 2)
