"""Finds what is wrong in what was measured between ranks: values, slow links, clocks that differ, hosts.

pairs of ranks --> links between hosts --> slow: less than a third of the fastest link, or of what the hardware gives
                                           all links of a host slow, and no other: that host, not its links
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.formatting import listed, size
from lockstep.doctor.findings import Finding, FindingState

SKEW_WARNS, SKEW_BREAKS = 1.0, 15.0
"""Seconds. torch's c10d rendezvous takes a host for dead whose last sign of life is older than 3 x 5 s by its own clock
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)."""
_SLOW = 1 / 3
_MOST_NAMED = 6  # links in one finding


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's host, its clock, and what its hardware gives.

    Attributes:
        clock: Seconds of the epoch, read by all ranks at about the same time.
        interface: By which it reaches other hosts; empty on loopback.
        speed: The interface's, in bytes per second; 0 if it isn't known.
        copies: Bytes per second at which memory is copied on the CPU; 0 where ranks don't exchange by that.
        tcp: Bytes per second of a TCP connection within the host, the most that one to another host can have; 0 where
            the backend doesn't use TCP, or the host was not measured by this rank.
        findings: What `lockstep doctor` finds wrong on the host; of one rank of each host.
    """

    host: str
    clock: float
    interface: str = ""
    speed: float = 0.0
    copies: float = 0.0
    tcp: float = 0.0
    findings: tuple[Finding, ...] = ()


def hosts_of(places: Sequence[RankPlace]) -> list[str]:
    """Return the names of the hosts, that of rank 0 first."""
    return list(dict.fromkeys(place.host for place in places))


def expected(first: RankPlace, second: RankPlace, places: Sequence[RankPlace]) -> tuple[float, str]:
    """Return the bytes per second that the hardware gives two ranks, and by what; 0 if it isn't known."""
    if first.host == second.host:
        copies = min(first.copies, second.copies)
        return copies, "memory copies" if copies else ""
    limits = {f"{place.interface} of {place.host}": place.speed for place in (first, second) if place.speed}
    hosts = first.host, second.host
    limits |= {f"TCP within {place.host}": place.tcp for place in places if place.tcp and place.host in hosts}
    if not any(place.speed for place in (first, second)):
        return 0.0, ""
    by = min(limits, key=lambda name: limits[name])
    return limits[by], by


def check_of_values(rows: Sequence[Any]) -> list[Finding]:
    """Return the collectives whose values are wrong."""
    bad = [f"{row.operation} of {size(row.size)}" for row in rows if not row.is_right]
    if bad:
        remedy = "Find the host: run with fewer ranks; then check its memory, cables and drivers."
        return [Finding(FindingState.WRONG, f"wrong values: {', '.join(bad)}", remedy, "values")]
    if not rows:
        return []
    operations = len({row.operation for row in rows})
    return [Finding(FindingState.OK, f"{operations} operations gave the right values on all ranks", "", "values")]


def check_of_pairs(pairs: Sequence[Any], places: Sequence[RankPlace]) -> list[Finding]:
    """Return the links that change messages, or are much slower than others or than their hardware."""
    findings = [_changed(pair, places) for pair in pairs if not pair.is_right]
    inside = [pair for pair in pairs if _has_links(places[pair.first], places[pair.second])]
    findings += [_slow_inside(pair, inside, places) for pair in inside if pair.bandwidth < _SLOW * _fastest(inside)]
    findings += _slow_links(_between_hosts(pairs, places), places)
    if pairs and not findings:
        slowest = min(pairs, key=lambda pair: pair.bandwidth)
        text = f"{len(pairs)}, the slowest {slowest.first}-{slowest.second}: {size(slowest.bandwidth)}/s"
        findings.append(Finding(FindingState.OK, text, "", "links"))
    return findings


def check_of_clocks(places: Sequence[RankPlace]) -> list[Finding]:
    """Return hosts whose clock differs from that of rank 0's host; of two hosts it isn't known which is wrong."""
    findings = []
    for host in hosts_of(places)[1:]:
        clock = next(place.clock for place in places if place.host == host)
        skew = abs(clock - places[0].clock)
        if skew >= SKEW_WARNS:
            state = FindingState.WRONG if skew >= SKEW_BREAKS else FindingState.WARNING
            seen = f"the clock of {host} is {skew:.1f} s {'ahead of' if clock > places[0].clock else 'behind'} that of "
            remedy = f"Set both by NTP, {host} and {places[0].host}: timedatectl set-ntp true"
            findings.append(Finding(state, f"{seen}{places[0].host}", remedy, "clock"))
    return findings


def check_of_hosts(places: Sequence[RankPlace]) -> list[Finding]:
    """Return what is wrong with hosts, each fact once."""
    hosts: dict[Finding, list[str]] = {}
    for place in places:
        for finding in place.findings:
            hosts.setdefault(finding, []).append(place.host)
    return [
        Finding(finding.state, f"on {listed(names, _MOST_NAMED)}: {finding.seen}", finding.remedy, finding.name)
        for finding, names in hosts.items()
    ]


# --- slow links -----------------------------------------------------------------------------------------------------


def _changed(pair: Any, places: Sequence[RankPlace]) -> Finding:
    remedy = "Check memory, cables and drivers of both."
    ranks = " and ".join(f"rank {rank} on {places[rank].host}" for rank in (pair.first, pair.second))
    return Finding(FindingState.WRONG, f"{ranks}: a message was changed", remedy, "link")


def _has_links(first: RankPlace, second: RankPlace) -> bool:
    """Return whether two ranks of one host exchange over links, as GPUs do; on CPUs differences are other programs'."""
    return first.host == second.host and not first.copies


def _slow_inside(pair: Any, inside: Sequence[Any], places: Sequence[RankPlace]) -> Finding:
    seen = (
        f"ranks {pair.first} and {pair.second} on {places[pair.first].host}: {size(pair.bandwidth)}/s; the fastest two "
        f"ranks of one host have {size(_fastest(inside))}/s"
    )
    remedy = "Look for other programs on these GPUs, and see how they are connected: nvidia-smi topo -m."
    return Finding(FindingState.WARNING, seen, remedy, "slow link")


def _between_hosts(pairs: Sequence[Any], places: Sequence[RankPlace]) -> dict[tuple[str, str], Any]:
    """Return the fastest pair of ranks for each two hosts: one pair may have been slow by chance."""
    links: dict[tuple[str, str], Any] = {}
    for pair in pairs:
        hosts = places[pair.first].host, places[pair.second].host
        if hosts[0] != hosts[1] and (hosts not in links or links[hosts].bandwidth < pair.bandwidth):
            links[hosts] = pair
    return links


def _slow_links(links: Mapping[tuple[str, str], Any], places: Sequence[RankPlace]) -> list[Finding]:
    fastest = _fastest([*links.values()])
    slow: dict[tuple[str, str], str] = {}
    for hosts, pair in links.items():
        hardware, by = expected(places[pair.first], places[pair.second], places)
        wanted = {"as the fastest link between hosts has": fastest, f"as {by} gives": hardware}
        why, bandwidth = max(wanted.items(), key=lambda item: item[1])
        if pair.bandwidth < _SLOW * bandwidth:
            sender = hosts[0] if pair.there < pair.back else hosts[1]
            slow[hosts] = f"{size(pair.bandwidth)}/s from {sender}, expected {size(bandwidth)}/s, {why}"
    ends = Counter(host for hosts in slow for host in hosts)
    whole = [host for host, number in ends.items() if number > 1 and number == sum(host in hosts for hosts in links)]
    if len(slow) > 1 and len(whole) == 1:
        return [_slow_host(whole[0], {hosts: text for hosts, text in slow.items() if whole[0] in hosts})] + [
            _slow_link(hosts, text, places) for hosts, text in slow.items() if whole[0] not in hosts
        ]
    return [_slow_link(hosts, text, places) for hosts, text in slow.items()]


def _slow_host(host: str, slow: Mapping[tuple[str, str], str]) -> Finding:
    named = [f"{hosts[0]} and {hosts[1]}: {text}" for hosts, text in slow.items()]
    more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    seen = f"all links of {host} are slow. {'; '.join(named[:_MOST_NAMED])}{more}"
    remedy = f"Check the cable, the network card and the switch port of {host}, and the interface that it uses."
    return Finding(FindingState.WARNING, seen, remedy, "slow link")


def _slow_link(hosts: tuple[str, str], text: str, places: Sequence[RankPlace]) -> Finding:
    used = " and ".join(f"{_interface(host, places)} on {host}" for host in hosts)
    remedy = (
        f"Check the route and the switches between the two, and that {used} are the interfaces of the fast network "
        "(launch.interface)."
    )
    return Finding(FindingState.WARNING, f"{hosts[0]} and {hosts[1]}: {text}", remedy, "slow link")


def _interface(host: str, places: Sequence[RankPlace]) -> str:
    return next(place.interface for place in places if place.host == host) or "an unknown one"


def _fastest(pairs: Sequence[Any]) -> float:
    return max((float(pair.bandwidth) for pair in pairs), default=0.0)
