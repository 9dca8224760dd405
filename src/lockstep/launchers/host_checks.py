"""Checks of all hosts, side by side, before anything is started on any of them.

    each host      reachable, its key known, Lockstep there, its versions, the working folder
    first host     a free port, and files in the folders that have to be shared
    the others     do they reach the first at an address and this port, do they see the files

All that is wrong with any host is reported in one message.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.core.errors import RunFailed
from lockstep.core.jobs import JobCommand
from lockstep.launchers.host_connection import HostConnection, HostUnfit
from lockstep.stores.addresses import is_address

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements of a run to its hosts.

    Attributes:
        folder: The working folder.
        shared: Folders that all hosts must share.
        rendezvous: HOST:PORT of the first host, if the user gives it.
    """

    folder: str
    shared: tuple[str, ...] = ()
    rendezvous: str | None = None


def shared_folders(command: JobCommand, here: Path, folder: str) -> list[str]:
    """Return the folder of the checkpoints on the hosts; none if there is no run, or an object store holds them.

    Args:
        here: The working folder in which the command names it.
        folder: The working folder on the hosts.
    """
    place = command.checkpoint_folder or str(command.run_folder)
    if not command.starts_run or not command.in_folder or is_address(place):
        return []
    absolute = here / place
    return [str(Path(folder) / absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)]


@dataclass
class _Inspection:
    connections: Sequence[HostConnection]
    wanted: Wanted
    problems: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[HostConnection, Answer] = field(default_factory=dict)

    def ask(
        self, connections: Sequence[HostConnection], question: Callable[[HostConnection], Answer]
    ) -> dict[HostConnection, Answer]:
        """Ask hosts at the same time; note what is wrong with those that can't answer."""

        def answer(connection: HostConnection) -> Answer | str:
            try:
                return question(connection)
            except HostUnfit as unfit:
                return str(unfit)

        with ThreadPoolExecutor(max(1, len(connections))) as pool:
            results = dict(zip(connections, pool.map(answer, connections), strict=True))
        for connection, result in results.items():
            if isinstance(result, str):
                self.problems.append((connection.host, result))
        return {connection: result for connection, result in results.items() if not isinstance(result, str)}


def check_hosts(connections: Sequence[HostConnection], wanted: Wanted) -> str | None:
    """Return the address at which the hosts meet; None for a single host. Raises RunFailed: a host is unfit."""
    inspection = _Inspection(connections, wanted)
    inspection.answers = inspection.ask(connections, lambda each: each.ask("look", folder=wanted.folder))
    _compare_versions(inspection)
    rendezvous = None
    first, *others = connections
    if others and first in inspection.answers:
        usable = [each for each in others if each in inspection.answers]
        _check_sharing(inspection, first, usable)
        rendezvous = _meeting_place(inspection, first, usable)
        inspection.ask([first], lambda each: each.ask("clear"))
    if inspection.problems:
        order = [each.host for each in connections]
        problems = sorted(inspection.problems, key=lambda problem: order.index(problem[0]))
        unfit = len({host for host, _ in problems})
        lines = "".join(f"\n  {host}: {text}" for host, text in problems)
        raise RunFailed(f"{unfit} of {len(connections)} hosts can't take part, and nothing was started:{lines}")
    return rendezvous


def _compare_versions(inspection: _Inspection) -> None:
    """Compare Lockstep with the one here, which has checked the command line, and the others between the hosts."""
    known: dict[str, tuple[str, str]] = {"Lockstep": (__version__, "here")}
    for connection, answer in inspection.answers.items():
        for name, version in answer["versions"].items():
            expected, where = known.setdefault(name, (version, f"on {connection.host}"))
            if version != expected:
                text = (
                    f"it has {name} {version}, and {where} is {expected}; install the same version, or give --program"
                )
                inspection.problems.append((connection.host, text))


def _check_sharing(inspection: _Inspection, first: HostConnection, others: Sequence[HostConnection]) -> None:
    folders = inspection.wanted.shared
    if not folders or not others:
        return
    marked = inspection.ask([first], lambda each: each.ask("mark", folders=folders, nonce=secrets.token_hex(8)))
    if first not in marked:
        return
    seen = inspection.ask(others, lambda each: each.ask("see", marks=marked[first]["marks"]))
    for connection, answer in seen.items():
        missing = ", ".join(folders[number] for number in answer["missing"])
        if missing:
            text = (
                f"it doesn't share {missing} with {first.host}, where the checkpoints are; give run.folder (or "
                "checkpoint.folder alone) a folder that all hosts mount, or checkpoint.folder an object store"
            )
            inspection.problems.append((connection.host, text))


def _meeting_place(inspection: _Inspection, first: HostConnection, others: Sequence[HostConnection]) -> str | None:
    """Return the first address and port at which the first host is reached by all others."""
    host, _, port = (inspection.wanted.rendezvous or "").rpartition(":")
    known = [*dict.fromkeys([*first.addresses, *inspection.answers[first]["addresses"]])]
    addresses = [host.strip("[]")] if host else known
    nonce = secrets.token_hex(16)
    listens = inspection.ask([first], lambda each: each.ask("listen", port=int(port or 0), nonce=nonce))
    if first not in listens:
        return None
    place = {"addresses": addresses, "port": listens[first]["port"], "nonce": nonce}
    reached = {
        each: answer["reached"] for each, answer in inspection.ask(others, lambda at: at.ask("reach", **place)).items()
    }
    best = max(addresses, key=lambda address: sum(address in each for each in reached.values()), default="")
    for connection, its in reached.items():
        if best not in its:
            tried = ", ".join(addresses)
            text = (
                f"it doesn't reach {first.host} at {tried}, port {place['port']}; open the firewall between the hosts, "
                "or give --rendezvous HOST:PORT"
            )
            inspection.problems.append((connection.host, text))
    return f"[{best}]:{place['port']}" if ":" in best else f"{best}:{place['port']}"
