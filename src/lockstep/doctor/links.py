"""Finds problems in measurements between ranks: values, slow links, clocks that differ, hosts.

pairs of ranks --> links between hosts --> slow: less than a third of the fastest link
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
"""Seconds. torch's c10d rendezvous takes a host for dead after 3 x 5 s without a sign of life by its own clock
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)."""
_SLOW = 1 / 3
_MOST_NAMED = 6  # links in one finding


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's host.

    Attributes:
        clock: Unix time, read by all ranks at about the same time.
        on_cpu: Ranks of one host then exchange by memory.
        findings: What is wrong on the host; of one rank of each host.
    """

    host: str
    clock: float
    on_cpu: bool = False
    findings: tuple[Finding, ...] = ()


def hosts_of(places: Sequence[RankPlace]) -> list[str]:
    """Return the names of the hosts, rank 0's first."""
    return list(dict.fromkeys(place.host for place in places))


def check_of_values(rows: Sequence[Any]) -> list[Finding]:
    """Return the collectives with wrong values."""
    bad = [f"{row.operation} of {size(row.size)}" for row in rows if not row.is_right]
    if bad:
        remedy = "Find the host: run with fewer ranks; then check its memory, cables and drivers."
        return [Finding(FindingState.WRONG, f"wrong values: {', '.join(bad)}", remedy, "values")]
    if not rows:
        return []
    operations = len({row.operation for row in rows})
    return [Finding(FindingState.OK, f"{operations} operations gave the right values on all ranks", "", "values")]


def check_of_pairs(pairs: Sequence[Any], places: Sequence[RankPlace]) -> list[Finding]:
    """Return the links, of GPUs in a host or of hosts, that change messages or are much slower than others."""
    findings = [_changed(pair, places) for pair in pairs if not pair.is_right]
    inside: dict[tuple[str, str], Any] = {}
    between: dict[tuple[str, str], Any] = {}
    for pair in pairs:
        first, second = places[pair.first].host, places[pair.second].host
        other = between.get((first, second))  # may have been slow by chance
        if first == second and not places[pair.first].on_cpu:
            inside[f"rank {pair.first} on {first}", f"rank {pair.second}"] = pair
        elif first != second and (other is None or other.bandwidth < pair.bandwidth):
            between[first, second] = pair
    remedy = "Look for other programs on these GPUs, and how they are connected: nvidia-smi topo -m."
    findings += _slow_links(inside, remedy)
    findings += _slow_links(between, "Check cables, network cards and switches, and the interfaces (launch.interface).")
    if pairs and not findings:
        slowest = min(pairs, key=lambda pair: pair.bandwidth)
        text = f"{len(pairs)}, the slowest {slowest.first}-{slowest.second}: {size(slowest.bandwidth)}/s"
        findings.append(Finding(FindingState.OK, text, "", "links"))
    return findings


def check_of_clocks(places: Sequence[RankPlace]) -> list[Finding]:
    """Return hosts with another clock than rank 0's host."""
    findings = []
    for host in hosts_of(places)[1:]:
        clock = next(place.clock for place in places if place.host == host)
        skew = abs(clock - places[0].clock)
        if skew >= SKEW_WARNS:
            state = FindingState.WRONG if skew >= SKEW_BREAKS else FindingState.WARNING
            seen = f"the clock of {host} is {skew:.1f} s {'ahead of' if clock > places[0].clock else 'behind'} "
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


def _changed(pair: Any, places: Sequence[RankPlace]) -> Finding:
    ranks = " and ".join(f"rank {rank} on {places[rank].host}" for rank in (pair.first, pair.second))
    remedy = "Check memory, cables and drivers of both."
    return Finding(FindingState.WRONG, f"{ranks}: a message was changed", remedy, "link")


def _slow_links(links: Mapping[tuple[str, str], Any], remedy: str) -> list[Finding]:
    fastest = max((float(pair.bandwidth) for pair in links.values()), default=0.0)
    slow: dict[tuple[str, str], str] = {}
    for ends, pair in links.items():
        if pair.bandwidth < _SLOW * fastest:
            sender = ends[0] if pair.there < pair.back else ends[1]
            slow[ends] = f"{ends[0]} and {ends[1]}: {size(pair.bandwidth)}/s from {sender}"
    counts = Counter(end for ends in slow for end in ends)
    whole = [end for end, number in counts.items() if number > 1 and number == sum(end in ends for ends in links)]
    texts = []
    if len(whole) == 1:
        named = [slow.pop(ends) for ends in [*slow] if whole[0] in ends]
        texts.append(f"all links of {whole[0]} are slow. {'; '.join(named[:_MOST_NAMED])}")
    return [
        Finding(FindingState.WARNING, f"{text}; the fastest link has {size(fastest)}/s", remedy, "slow link")
        for text in (*texts, *slow.values())
    ]
