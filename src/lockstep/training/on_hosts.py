"""Starts a run on several hosts: the launchers meet, the leader checks and creates the folder, all start ranks.

leader    meet --> `start_run`: check, folder, ranks --> further rounds --> the run's result
others    meet -----------------------> folder, ranks --> further rounds --> the same result
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lockstep.config.schema import Config
from lockstep.config.writing import to_plain
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.nodes import is_elastic, node_range
from lockstep.launch.agent import FollowerRounds, Hosts, LaunchState
from lockstep.launch.devices import choose_ranks
from lockstep.launch.local import import_ahead, launch
from lockstep.launch.memory_folder import MemoryFolder
from lockstep.launch.other_launchers import interface_variables
from lockstep.launch.outcome import LaunchResult, print_on_stderr
from lockstep.launch.rendezvous import connected_hosts
from lockstep.monitor.folder import LOGS
from lockstep.plan.plan import check_on_ranks
from lockstep.training.ahead import imports_ahead
from lockstep.training.job import Job
from lockstep.training.memory_snapshots import left_on_host
from lockstep.training.out_of_memory import advice, memory_factors
from lockstep.training.ownership import flat
from lockstep.training.start_run import decided, is_done, launch_job, train_as_rank

_OF_HOST = ("launch", "monitor", "description")  # sections that may differ between hosts


def train_on_hosts(job: Job, ranks: int | Literal["auto"]) -> tuple[Path | None, LaunchResult]:
    """Run the job as one of several hosts, with N ranks on this one; return the folder and how the ranks ended.

    The folder is None on hosts that have none because nothing was left to train.
    """
    section = job.config.launch
    number = choose_ranks(section) if ranks == "auto" else ranks
    if is_elastic(section.nodes):
        _refuse_numbers_of_hosts(job.config, number)
    recovery = job.config.recovery
    with connected_hosts(
        section,
        number,
        _common_settings(job),
        recovers=recovery.ever,
    ) as hosts:
        import_ahead(imports_ahead(job.config))
        hosts.meet()
        interface_variables(section.interface)  # refused here, before anything is made, all hosts report it
        job = replace(job, config=_without_hosts(job.config))  # a run's config may be trained from on one host
        return _lead(job, number, hosts) if hosts.leads else _follow(job, number, hosts)


def _refuse_numbers_of_hosts(config: Config, ranks: int) -> None:
    """Raise ConfigError that lists with which numbers of hosts, with as many ranks as this one, the run can't train."""
    if not config.recovery.budget("host"):
        why = f"no budget for lost hosts, but launch.nodes {config.launch.nodes} continues without them; give 3"
        raise ConfigError(Problem("", "recovery.restarts", why))
    least, most = node_range(config.launch.nodes)
    refusals = []
    for nodes in range(least, most + 1):
        try:
            check_on_ranks(config, nodes * ranks)
        except ConfigError as error:
            refusals.append(f"\n  {_plural(nodes, 'host')}, {_plural(nodes * ranks, 'rank')}: {error}")
    if refusals:
        why = f"{config.launch.nodes}, but the run can't train on each of these numbers of hosts:{''.join(refusals)}"
        raise ConfigError(Problem("", "launch.nodes", why))


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number > 1)}"


def _lead(job: Job, ranks: int, hosts: Hosts) -> tuple[Path | None, LaunchResult]:
    if is_done(job, is_first=True):
        path, result = Path(job.config.run.folder or ""), LaunchResult(FailureKind.DONE)
    else:
        others = ", ".join(str(host) for host in hosts.world[1:])
        there = f"this one, {hosts.here}, is node 0" + (f"; the others: {others}" if others else "")
        print_on_stderr(f"{_plural(len(hosts.world), 'host')}: {there}")
        path, result = launch_job(job, ranks, hosts)
    hosts.finish(result)
    return path, result


def _follow(job: Job, ranks: int, hosts: Hosts) -> tuple[Path | None, LaunchResult]:
    """Start this host's ranks in the run that the leader has made."""
    path = hosts.wait_for_folder()
    if path is None:
        print_on_stderr("nothing is left to train, as node 0 reports")
        return None, LaunchResult(FailureKind.DONE)
    logs = path / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise RunFailed(f"host {hosts.name} can't create {logs} for its ranks' logs: {reason}") from None
    where = f"logs are in {logs}, and rank 0 prints on host {hosts.world[0].name}"
    print_on_stderr(f"{len(hosts.world)} hosts: this one, {hosts.here}, is node {hosts.node}; {where}")
    remedy = partial(advice, memory_factors(job.config, hosts.size), "forward")
    ahead = imports_ahead(job.config)
    recovery = job.config.recovery
    with _memory_kept(job, path, hosts) as memory:
        entries = _entries(replace(job, memory=memory))
        rounds = FollowerRounds(hosts, recovery.host_wait, entries) if hosts.recovers else None
        result = launch(
            entries(path, hosts.decision), ranks, job.config.launch, logs, preload=ahead, remedy=remedy, hosts=hosts,
            supervisor=rounds, watchdog=recovery.watchdog,
        )  # fmt: skip
    if hosts.state is LaunchState.CALLED:
        hosts.fail(result.kind, f"stopped on host {hosts.name}")
    if result.code == 0:
        print_on_stderr(f"done: {hosts.here}; the run is in {path} on host {hosts.world[0].name}")
    return path, result


@contextmanager
def _memory_kept(job: Job, run: Path, hosts: Hosts) -> Iterator[Path | None]:
    """Yield this host's folder in memory, which stays for the next start of the run if that may need it."""
    takes = job.config.recovery.snapshot_every is not None
    memory = MemoryFolder.make(run, hosts=len(hosts.world)) if takes else None
    try:
        yield memory.path if memory is not None else None
    finally:
        if memory is not None:
            if not hosts.is_done and (text := left_on_host(job, run, memory)):
                print_on_stderr(text)
            memory.remove()


def _entries(job: Job) -> Callable[[Path, Mapping[str, Any]], Callable[[], int]]:

    def entry(folder: Path, decision: Mapping[str, Any]) -> Callable[[], int]:
        return partial(train_as_rank, decided(job, decision), folder)

    return entry


def _without_hosts(config: Config) -> Config:
    alone = {"nodes": 1, "rendezvous": None, "node_rank": None}
    return config.model_copy(update={"launch": config.launch.model_copy(update=alone)})


def _common_settings(job: Job) -> dict[str, str]:
    """Return what must be equal on all hosts, by name: hashes, because hosts send them to each other."""
    plain = {section: value for section, value in to_plain(job.config).items() if section not in _OF_HOST}
    launch, resume = job.config.launch, job.resume
    flags = {
        "--fresh": resume.fresh,
        "--from": resume.step,
        "--fork": resume.origin is not None,
        "--accept-changes": resume.accept_changes,
        "recipe": job.recipe,
        "launch.backend": launch.backend,
        "launch.device": launch.device,
        "launch.job_id": launch.job_id,
    }
    values = {**dict(flat(plain)), **flags}
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for name, value in values.items()}
