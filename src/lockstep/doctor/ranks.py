"""Collectives between ranks: are their values right, how fast are they, which link or host is slow or wrong?

Started by Lockstep's launcher, which names a rank that hangs or ends, or as a rank of any other one.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.schema import Launch
from lockstep.core.errors import RunFailed, VerificationError
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import aligned, counted, short_time, size
from lockstep.core.json_output import emit
from lockstep.core.ranks import RankEnvironment, names_a_rank
from lockstep.core.terminal import echo
from lockstep.doctor.checks import CHECKS, examine
from lockstep.doctor.findings import Finding, FindingState, MachineView, describe
from lockstep.doctor.links import (
    RankPlace,
    check_of_clocks,
    check_of_hosts,
    check_of_pairs,
    check_of_values,
    hosts_of,
)
from lockstep.launch.devices import choose_ranks
from lockstep.launch.local import import_ahead, launch
from lockstep.launch.outcome import LaunchResult, print_on_stderr
from lockstep.launch.rendezvous import connected_hosts

if TYPE_CHECKING:
    from lockstep.distributed.process_group import World

_SMALLEST, _STEP = 1 << 10, 16
_PAIR_BYTES = 4 << 20
_ALL_PAIRS_UP_TO = 16  # ranks; beyond, the first ranks of hosts, and neighbors
_OF_ONE_PROCESS = ("rank variables", "port", "threads", "clock", "hub")
"""Checks that are left out here."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement with buffers up to `largest` bytes, shown in `width` columns (None: a file)."""

    section: Launch
    largest: int
    width: int | None
    as_json: bool


def start(measurement: Measurement) -> int:
    """Measure between ranks of this machine or of several hosts, or as a rank of another launcher; return 0 or 3."""
    if names_a_rank(os.environ):
        return check_ranks(measurement, None)
    section = measurement.section
    ranks = choose_ranks(section)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        entry = partial(check_ranks, measurement, file)
        try:
            result = _on_hosts(entry, ranks, section) if section.nodes != 1 else launch(entry, ranks, section, None)
        except RunFailed as failure:  # not all hosts have come
            result = LaunchResult(FailureKind.WRONG, str(failure))
        if measurement.as_json and file.is_file():
            emit(json.loads(file.read_text()))
        code = result.show()
        return VerificationError.exit_code if code == RunFailed.exit_code else code


def _on_hosts(entry: Callable[[], int], ranks: int, section: Launch) -> LaunchResult:
    with connected_hosts(section, ranks, {}) as hosts:
        import_ahead(())
        hosts.meet()
        others = ", ".join(str(host) for host in hosts.world if host is not hosts.here)
        print_on_stderr(f"{len(hosts.world)} hosts: this one, {hosts.here}, is node {hosts.node}; the others: {others}")
        result = launch(entry, ranks, section, None, hosts=hosts)
        if hosts.leads:
            hosts.finish(result)
        return result


def check_ranks(measurement: Measurement, file: Path | None) -> int:
    """Measure, on a rank; rank 0 prints, or writes its results to `file`.

    Raises:
        VerificationError: Something is wrong; on all ranks.
    """
    from lockstep.distributed.measurements import timed_collectives, timed_pairs
    from lockstep.distributed.process_group import joined

    with joined(measurement.section, grouped=True) as world:
        places = _places(world, measurement)
        shows = world.rank == 0 and not measurement.as_json
        if shows:
            hosts = f"{counted(len(hosts_of(places)), 'host')} ({', '.join(hosts_of(places))})"
            title = f"{len(places)} ranks on {hosts}, {world.backend} on {world.device.type}"
            echo(f"{title}\n\n{_HEADER}", flush=True)
        rows = []
        for row in timed_collectives(world, _sizes(measurement.largest)) if world.size > 1 else ():
            rows.append(row)
            if shows:
                echo(_row(row), flush=True)
        pairs = timed_pairs(world, _pairs(places), _PAIR_BYTES)
        findings = [
            *check_of_hosts(places),
            *check_of_values(rows),
            *check_of_pairs(pairs, places),
            *check_of_clocks(places),
        ]
        if shows:
            _show(findings, pairs, measurement.width)
        elif world.rank == 0:
            content = _as_json(world, places, rows, pairs, findings)
            if file is not None:
                file.write_text(json.dumps(content))
            else:
                emit(content)
    wrong = [f"{finding.name}: {finding.seen}" for finding in findings if finding.state is FindingState.WRONG]
    if wrong:
        raise VerificationError(f"{len(wrong)} wrong: {'; '.join(wrong)}")
    return 0


# --- a rank's own part ----------------------------------------------------------------------------------------------


def _places(world: World, measurement: Measurement) -> list[RankPlace]:
    hosts: list[Any] = world.axis.gather(socket.gethostname())
    leads_host = len(set(hosts)) > 1 and world.local_rank == 0
    here = _wrong_here(measurement.section) if leads_host else []
    world.axis.gather(None)  # a barrier with a time limit: the clocks are read at the same time
    place = RankPlace(socket.gethostname(), time.time(), world.device.type == "cpu", tuple(here))
    places: list[Any] = world.axis.gather(place)
    return places


def _wrong_here(section: Launch) -> list[Finding]:
    """Return what is wrong with this host, as `lockstep doctor` finds it without a launcher's variables."""
    of_rank = RankEnvironment().variables()
    environ = {name: value for name, value in os.environ.items() if name not in of_rank}
    machine = MachineView(environ=environ, device=section.device)
    findings = examine(machine, [check for check in CHECKS if check.name not in _OF_ONE_PROCESS])
    return [finding for finding in findings if finding.state is FindingState.WRONG]


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


# --- text and JSON --------------------------------------------------------------------------------------------------

_HEADER = f"{'operation':<15} {'size':>9} {'time':>10} {'algorithm':>13} {'bus':>13}"


def _row(row: Any) -> str:
    bandwidths = f"{size(row.algorithm_bandwidth) + '/s':>13} {size(row.bus_bandwidth) + '/s':>13}"
    note = "" if row.is_right else "  wrong values"
    return f"{row.operation:<15} {size(row.size):>9} {short_time(row.seconds):>10} {bandwidths}{note}"


def _show(findings: Sequence[Finding], pairs: Sequence[Any], width: int | None) -> None:
    rows = [["pair", "latency", "there", "back"]]
    for pair in pairs:
        speeds = [f"{size(pair.there)}/s", f"{size(pair.back)}/s"]
        rows.append([f"{pair.first}-{pair.second}", short_time(pair.latency), *speeds])
    echo("\n".join(["", *aligned(rows, left={0})]), flush=True)
    echo(f"\n{describe(findings, width)}", flush=True)


def _as_json(
    world: World, places: Sequence[RankPlace], rows: Sequence[Any], pairs: Sequence[Any], findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
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
