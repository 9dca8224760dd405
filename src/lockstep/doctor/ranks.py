"""Collectives between N ranks: are their values right, how fast are they, which link is slow?

    start --> `check_ranks` on each rank --> RankResults of rank 0, in a file --> text or JSON

Started by Lockstep's launcher, or as a rank of any other one. A rank that hangs or ends is named by the launcher when
`launch.timeout` is over.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.schema import Launch
from lockstep.core.errors import RunFailed
from lockstep.core.formatting import duration, size
from lockstep.core.interfaces import route_to
from lockstep.core.json_output import emit
from lockstep.core.ranks import names_a_rank
from lockstep.core.terminal import echo
from lockstep.doctor.findings import Finding, FindingState, MachineView
from lockstep.doctor.interfaces import interfaces
from lockstep.doctor.output import describe, exit_code
from lockstep.launch.local import launch

_SMALLEST, _STEP = 1 << 10, 16
_PAIR_BYTES = 4 << 20
_ALL_PAIRS_UP_TO = 16  # ranks; beyond, the first ranks of hosts, and neighbors
_SLOW = 1 / 3  # of the fastest such link, or of the interface's speed
_SKEW_WARNS, _SKEW_BREAKS = 1.0, 15.0  # seconds, as in `system`


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's host, its clock, and the interface by which it reaches the store.

    Attributes:
        clock: Seconds of the epoch, read by all ranks at about the same time.
        interface: Empty on loopback.
        speed: The interface's, in bytes per second; 0 if it isn't known.
        copies: Bytes per second at which memory is copied.
    """

    host: str
    clock: float
    interface: str
    speed: float
    copies: float


def start(ranks: int, section: Launch, largest: int, width: int, *, as_json: bool) -> int:
    """Measure between `ranks` ranks of this machine, or as one of another launcher's; return the exit code."""
    if names_a_rank(os.environ):
        return check_ranks(section, largest, None, width, as_json)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        result = launch(partial(check_ranks, section, largest, file, width, as_json), ranks, section, None)
        if result.code == RunFailed.exit_code:
            result.show()
            return 3
        if as_json and file.is_file():
            emit(json.loads(file.read_text()))
        return result.show()


def check_ranks(section: Launch, largest: int, file: Path | None, width: int, as_json: bool) -> int:
    """Measure, on a rank; the first one prints. Return 3 if something is wrong."""
    from lockstep.distributed.measurements import copy_bandwidth, timed_collectives, timed_pairs
    from lockstep.distributed.process_group import joined

    with joined(section, grouped=True) as world:
        copies = copy_bandwidth(min(largest, 64 << 20), world.device)
        world.axis.gather(None)  # a barrier with a time limit: the clocks are read at the same time
        places: list[Any] = world.axis.gather(_place(copies))
        is_first = world.rank == 0
        if is_first and not as_json:
            echo(f"{_title(places)}, {world.backend} on {world.device.type}\n\n{_HEADER}", flush=True)
        rows = []
        for row in timed_collectives(world, _sizes(largest)) if world.size > 1 else ():
            rows.append(row)
            if is_first and not as_json:
                echo(_row(row), flush=True)
        pairs = timed_pairs(world, _pairs(places), _PAIR_BYTES)
        findings = [*check_of_values(rows), *check_of_pairs(pairs, places), *check_of_clocks(places)]
        if is_first:
            if not as_json:
                _show(findings, pairs, places, width)
            content = {
                "ranks": world.size,
                "hosts": [place.host for place in places],
                "backend": world.backend,
                "device": world.device.type,
                "collectives": [
                    {
                        **asdict(row),
                        "algorithm_bytes_per_second": row.algorithm_bandwidth,
                        "bus_bytes_per_second": row.bus_bandwidth,
                    }
                    for row in rows
                ],
                "pairs": [asdict(pair) for pair in pairs],
                "findings": [finding.as_json() for finding in findings],
            }
            if file is not None:
                file.write_text(json.dumps(content))
            elif as_json:
                emit(content)
    return exit_code(findings)


# --- what the figures show ----------------------------------------------------------------------------------------


def check_of_values(rows: Sequence[Any]) -> list[Finding]:
    """Return the collectives whose values are wrong."""
    bad = [f"{row.operation} of {size(row.size)}" for row in rows if not row.is_right]
    if bad:
        remedy = "Find the host: run with fewer ranks; then check its memory, cables and drivers."
        return [Finding(FindingState.WRONG, f"wrong values: {', '.join(bad)}", remedy, "values")]
    operations = len({row.operation for row in rows})
    return [Finding(FindingState.OK, f"{operations} operations gave the right values on all ranks", "", "values")]


def check_of_pairs(pairs: Sequence[Any], places: Sequence[RankPlace]) -> list[Finding]:
    """Return the pairs of ranks that are much slower than others, or than their interface."""
    findings: list[Finding] = []
    for is_inside in (True, False):
        kind = [pair for pair in pairs if (places[pair.first].host == places[pair.second].host) is is_inside]
        fastest = max((pair.bandwidth for pair in kind), default=0.0)
        for pair in kind:
            hosts = f"rank {pair.first} ({places[pair.first].host}) and rank {pair.second} ({places[pair.second].host})"
            speed = 0.0 if is_inside else min(places[pair.first].speed, places[pair.second].speed)
            seen = f"{hosts}: {size(pair.bandwidth)}/s"
            if not pair.is_right:
                remedy = "Check memory, cables and drivers of both hosts."
                findings.append(Finding(FindingState.WRONG, f"{hosts}: a message was changed", remedy, "link"))
            elif pair.bandwidth < _SLOW * fastest:
                findings.append(
                    _slow(f"{seen}; the fastest such link has {size(fastest)}/s", is_inside, places[pair.second])
                )
            elif speed and pair.bandwidth < _SLOW * speed:
                findings.append(_slow(f"{seen}; the interface has {size(speed)}/s", is_inside, places[pair.second]))
    if pairs and not findings:
        slowest = min(pairs, key=lambda pair: pair.bandwidth)
        text = f"{len(pairs)}, the slowest {slowest.first}-{slowest.second}: {size(slowest.bandwidth)}/s"
        findings.append(Finding(FindingState.OK, text, "", "links"))
    return findings


def check_of_clocks(places: Sequence[RankPlace]) -> list[Finding]:
    """Return hosts whose clock differs from that of rank 0's host."""
    findings = []
    for rank, place in enumerate(places):
        skew = abs(place.clock - places[0].clock)
        is_first_of_host = all(other.host != place.host for other in places[:rank])
        if is_first_of_host and skew >= _SKEW_WARNS:
            state = FindingState.WRONG if skew >= _SKEW_BREAKS else FindingState.WARNING
            seen = f"the clock of {place.host} differs by {skew:.1f} s from that of {places[0].host}"
            findings.append(Finding(state, seen, f"Set it by NTP on {place.host}: timedatectl set-ntp true", "clock"))
    return findings


def _slow(seen: str, is_inside: bool, place: RankPlace) -> Finding:
    by = f" (here {place.interface})" if place.interface else ""
    remedy = (
        "Look for other programs on these cores or GPUs, and see nvidia-smi topo -m."
        if is_inside
        else f"Check cable, switch and route of that host, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME{by}."
    )
    return Finding(FindingState.WARNING, seen, remedy, "slow link")


# --- a rank's own part --------------------------------------------------------------------------------------------


def _place(copies: float) -> RankPlace:
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    source = route_to(master, socket.AF_INET)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = interfaces(MachineView())
    interface = next((item for item in here if item.name == chosen or (not chosen and item.address == source)), None)
    is_network = interface is not None and not interface.address.startswith("127.")
    name, speed = (interface.name, interface.speed * 125_000.0) if interface and is_network else ("", 0.0)
    return RankPlace(socket.gethostname(), time.time(), name, speed, copies)


def _pairs(places: Sequence[RankPlace]) -> list[tuple[int, int]]:
    ranks = range(len(places))
    if len(places) <= _ALL_PAIRS_UP_TO:
        return list(itertools.combinations(ranks, 2))
    hosts = [place.host for place in places]
    leaders = [rank for rank in ranks if hosts.index(hosts[rank]) == rank]
    neighbors = {(rank, rank + 1) for rank in ranks[:-1] if hosts[rank] == hosts[rank + 1]}
    return sorted({*itertools.combinations(leaders, 2), *neighbors})


def _sizes(largest: int) -> list[int]:
    sizes = [_SMALLEST]
    while sizes[-1] * _STEP <= largest:
        sizes.append(sizes[-1] * _STEP)
    return sizes if sizes[-1] >= largest else [*sizes, largest]


# --- text ---------------------------------------------------------------------------------------------------------

_HEADER = f"{'operation':<15} {'size':>9} {'time':>10} {'algorithm':>13} {'bus':>13}"


def _row(row: Any) -> str:
    bandwidths = f"{size(row.algorithm_bandwidth) + '/s':>13} {size(row.bus_bandwidth) + '/s':>13}"
    note = "" if row.is_right else "  wrong values"
    return f"{row.operation:<15} {size(row.size):>9} {_time(row.seconds):>10} {bandwidths}{note}"


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 1 else duration(seconds)
    )


def _title(places: Sequence[RankPlace]) -> str:
    hosts = list(dict.fromkeys(place.host for place in places))
    return f"{len(places)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)} ({', '.join(hosts)})"


def _show(findings: Sequence[Finding], pairs: Sequence[Any], places: Sequence[RankPlace], width: int) -> None:
    lines = [f"\n{'pair':<9} {'latency':>10} {'bandwidth':>13}   what the hardware gives"]
    for pair in pairs:
        first, second = places[pair.first], places[pair.second]
        speed = min(first.speed, second.speed)
        best = f"memory copies {size(first.copies)}/s" if first.host == second.host else "unknown"
        if first.host != second.host and speed:
            best = f"{first.interface} {size(speed)}/s"
        bandwidth = f"{size(pair.bandwidth)}/s"
        lines.append(f"{f'{pair.first}-{pair.second}':<9} {_time(pair.latency):>10} {bandwidth:>13}   {best}")
    echo("\n".join(lines), flush=True)
    echo(f"\n{describe(findings, width)}", flush=True)
