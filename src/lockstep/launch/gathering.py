"""Decides which launchers meet for a round, when it begins, and which host is which.

    round 1    a there, b there                    all are there: it begins
    round 2    a ready, b ready                    at once: no host is missing
    round 3    a ready, b lost, then there again   it begins when b has come; with MIN:MAX, seconds after b was lost
               a ready, c waits                    c takes the place of b
    round 4    b's copies differ a second time     b is left out, if those that stay are enough

Arithmetic alone: `relay` has the connections.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.core.nodes import node_range

_MAX_KEYS = 5  # settings shown in a message
_ONCE_TOO_OFTEN = 2  # rounds that a host's copies have ended: one may be chance, and the next is its memory or a device
T = TypeVar("T", bound=Mapping[str, Any])


@dataclass
class Guest:
    """A launcher that is connected.

    Attributes:
        hello: What it has introduced itself with.
        ready: Whether it waits for the next round; otherwise its ranks of the last one may still run.
        node: Its node rank in the round that runs; None: it takes no part.
        has_trained: Whether it has taken part in a round.
        differed: Rounds that ended because its ranks held other copies of the training state than most.
    """

    hello: Mapping[str, Any]
    ready: bool = True
    node: int | None = None
    has_trained: bool = False
    differed: int = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """The time before a round.

    Attributes:
        least, most: Numbers of hosts with which it may begin.
        early: When it may begin with less than all (seconds, CLOCK_MONOTONIC).
    """

    least: int
    most: int
    early: float = math.inf

    def chosen(self, guests: Sequence[Guest], now: float) -> list[Guest]:
        """Return those with which the round begins now; none: it doesn't. The first one leads."""
        there: list[Guest] = []
        for guest in guests:
            rank = guest.hello["node_rank"]
            if guest.ready and (rank is None or all(rank != other.hello["node_rank"] for other in there)):
                there.append(guest)
        if len(there) >= self.most:
            return there[: self.most]
        all_ready = all(guest.ready for guest in guests)
        return there if len(there) >= self.least and all_ready and now >= self.early else []


def left_out(guests: Sequence[Guest], least: int) -> tuple[list[Guest], list[Guest]]:
    """Return the hosts that are left out because copies on them have differed too often, and those that are needed.

    Args:
        guests: All that are there. The first one leads, and stays.
        least: Number of hosts that have to stay.
    """
    suspects = [guest for guest in guests if guest.differed >= _ONCE_TOO_OFTEN]
    leaving = [guest for guest in suspects if guest is not guests[0]][: max(0, len(guests) - least)]
    return leaving, [guest for guest in suspects if all(guest is not other for other in leaving)]


def differed_text(guest: Guest) -> str:
    """Return the sentences about a host whose copies have differed too often."""
    return (
        f"copies of the training state on host {guest.hello['host']} have differed from most others' in "
        f"{guest.differed} rounds: look at its memory and devices."
    )


def refusal_of(hellos: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> str:
    """Return why a host can't join those that are there, the leader first; empty: it can.

    Args:
        new: `host`, `node_rank` (or None), `nodes` (or MIN:MAX), `versions` and `settings`, texts by name.
    """
    leader = hellos[0]
    if new["nodes"] != leader["nodes"]:
        return (
            f"host {new['host']} was started with --nodes {new['nodes']}, and host {leader['host']} with --nodes "
            f"{leader['nodes']}; give all hosts the same number"
        )
    for name, version in leader["versions"].items():
        if new["versions"].get(name) != version:
            other = new["versions"].get(name, "none")
            return (
                f"host {new['host']} has {name} {other}, and host {leader['host']} {version}; install the same version "
                "on all hosts"
            )
    names = {**leader["settings"], **new["settings"]}
    differing = [name for name in names if leader["settings"].get(name) != new["settings"].get(name)]
    if differing:
        more = f" and {len(differing) - _MAX_KEYS} more" if len(differing) > _MAX_KEYS else ""
        return (
            f"host {new['host']} was started with other settings than host {leader['host']}: "
            f"{', '.join(differing[:_MAX_KEYS])}{more}; give all hosts the same command and config"
        )
    for other in hellos:
        if new["node_rank"] is not None and other["node_rank"] == new["node_rank"]:
            return (
                f"hosts {other['host']} and {new['host']} both have --node-rank {new['node_rank']}; give each host a "
                "rank of its own, or leave the option out on all"
            )
    return ""


def in_places(hellos: Sequence[T]) -> list[T]:
    """Return the hosts by node rank: those with one in its place, the others in the order of their arrival.

    Where hosts are missing, the others move up.
    """
    places: dict[int, T] = {hello["node_rank"]: hello for hello in hellos if hello["node_rank"] is not None}
    free = iter(place for place in itertools.count() if place not in places)
    for hello in hellos:
        if hello["node_rank"] is None:
            places[next(free)] = hello
    return [places[place] for place in sorted(places)]


def waiting_text(hellos: Sequence[Mapping[str, Any]], address: str, limit: str) -> str:
    """Return the note about hosts that have not come yet."""
    came, missing = _came_and_missing(hellos)
    there = f"{len(hellos)} of {hellos[0]['nodes']} hosts are at {address}: {came}; missing: {missing}"
    return f"{there}. They are waited for up to {limit}"


def missing_text(hellos: Sequence[Mapping[str, Any]], address: str, limit: str) -> str:
    """Return the message about hosts that have not come."""
    came, missing = _came_and_missing(hellos)
    return (
        f"{len(hellos)} of {hellos[0]['nodes']} hosts reached {address} within {limit}: {came}; "
        f"missing: {missing}. Start the same command on each host, and let the hosts reach {address}"
    )


def _came_and_missing(hellos: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the names of the hosts that are there, and which are missing."""
    nodes = node_range(hellos[0]["nodes"])[1]
    came = ", ".join(str(hello["host"]) for hello in hellos)
    if any(hello["node_rank"] is not None for hello in hellos[1:]):
        absent = [str(place) for place in range(nodes) if place not in {hello["node_rank"] for hello in hellos}]
        missing = f"node rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
    else:
        missing = f"{nodes - len(hellos)} more"
    return came, missing
