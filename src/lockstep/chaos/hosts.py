"""Trains on several hosts of this machine, kills a host's launcher or disturbs the network between them."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lockstep.chaos.kinds import Cluster
from lockstep.chaos.launchers import Launchers
from lockstep.chaos.namespaces import Network, joined, new_name
from lockstep.launch.rendezvous import TOKEN
from lockstep.resilience.faults import FAULTS, HOST, SHRINK, Fault, events_of, note
from lockstep.training.job import Job
from lockstep.training.start_run import train_on_hosts

_PORT = 29500  # free in the namespace of a host that has just been made
_BROKEN_S = 8.0  # longer than the silence of a lost host
_AWAY_S = 1.0

Act = Callable[[Network, int], None]
_NETWORK_ACTS: Mapping[str, tuple[Act, Act | None]] = {
    "partition": (Network.cut, Network.join),
    "one-way": (Network.lose, Network.find),
    "slow-link": (Network.slow, None),
}
"""Kind of fault -> what begins it on a host, and what ends it."""


def train_on_several(job: Job, world: Cluster, fault: Fault, plan: Path, launchers: Launchers) -> int:
    """Train on the hosts of a world while a fault happens; return the exit code. Outputs go beside the plan."""
    token = secrets.token_hex()
    with joined(Network(new_name(), world.hosts, plan.parent)) as network, launchers:

        def start(host: int) -> int:
            launch = partial(network.run, host, partial(_train, job, world, host, network.address(0)))
            return launchers.start(launch, output_of(plan.parent, host), {TOKEN: token, FAULTS: str(plan)})

        disturbed = _Disturbed(network, fault, fault.rank // world.ranks, plan)
        running = {start(host): host for host in range(world.hosts)}
        codes: dict[int, int] = {}
        while len(codes) < world.hosts:
            for process, code in launchers.ended().items():
                host = running.pop(process)
                if code == -signal.SIGKILL and host == disturbed.host and fault.kind in (HOST, SHRINK):
                    disturbed.lost(time.monotonic())
                    code = 0
                codes[host] = code
            if disturbed.follow():
                del codes[disturbed.host]
                running[start(disturbed.host)] = disturbed.host
            launchers.pause()
    return next((code for code in codes.values() if code), 0)


def output_of(folder: Path, host: int = 0) -> Path:
    """Return the file with what a host of a round has printed."""
    return folder / ("output.txt" if host == 0 else f"output-of-host-{host}.txt")


@dataclass
class _Disturbed:
    network: Network
    fault: Fault
    host: int
    plan: Path
    began: bool = False
    next_at: float | None = None

    def lost(self, moment: float) -> None:
        """Note that its launcher was killed."""
        if self.fault.kind == HOST and not self.began:
            self.began, self.next_at = True, moment + _AWAY_S

    def follow(self) -> bool:
        """Do the event that is scheduled now; return whether to start its launcher again."""
        acts = _NETWORK_ACTS.get(self.fault.kind)
        if acts is not None and not self.began and any(event["event"] == "waits" for event in events_of(self.plan)):
            self.began, self.next_at = True, time.monotonic() + _BROKEN_S
            acts[0](self.network, self.host)
            Path(self.fault.folder).touch()
        if self.next_at is None or time.monotonic() < self.next_at:
            return False
        self.next_at = None
        mend = None if acts is None else acts[1]
        if mend is not None:
            mend(self.network, self.host)
        if mend is not None or acts is None:
            note(self.plan, "mended", host=self.host)
        return acts is None


def _train(job: Job, world: Cluster, host: int, address: str) -> int:
    nodes = world.hosts if world.least == world.hosts else f"{world.least}:{world.hosts}"
    place = {"nodes": nodes, "rendezvous": f"{address}:{_PORT}", "node_rank": host, "ranks": world.ranks}
    job = replace(job, config=job.config.with_values(launch=place))
    return train_on_hosts(job, world.ranks)[1].show()
