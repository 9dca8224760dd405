"""The entrypoint of a Ray job: places one actor on each node, which starts a launcher there, and follows the run."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.core.errors import ConfigError, Paused, RunFailed
from lockstep.core.stopping import handled_signals, stop_at_once
from lockstep.core.terminal import echo, plain
from lockstep.launch.rendezvous import TOKEN

_POLL_S = 0.5
_NOTED_S = 2.0
_OTHERS_END_S = 10.0  # after a launcher has failed or node 0 has ended: all know of it by then
_KILLED_S = 15.0

Order = Mapping[str, Any]


def drive(text: str) -> int:
    """Run the command of an order, which is JSON, on the nodes of this cluster; return its exit code."""
    try:
        import ray
    except ImportError:
        raise RunFailed(f"{sys.executable} has no Ray; install the cluster's version of it there") from None
    order: Order = json.loads(text)
    _enter(order["folder"])
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (RuntimeError, OSError, ValueError) as error:
        message = plain(" ".join(str(error).split()))
        raise RunFailed(f"Ray of {sys.executable} can't join this cluster: {message}") from None
    stop_at_once()  # Ray has set handlers of its own
    for attempt in range(order["retries"] + 1):
        group = _place(order)
        run = _Run(_nodes(order, group), order["grace"])
        run.start(order, attempt)
        code = run.follow()
        ray.util.remove_placement_group(group)
        lost = [node.name for node in run.nodes if node.lost]
        if code == 0 or run.stops or not lost or attempt == order["retries"]:
            return code
        echo(f"lockstep: starts again without {', '.join(lost)}, retry {attempt + 1} of {order['retries']}", flush=True)
    raise AssertionError("the last attempt returns")


def _enter(folder: str | None) -> None:
    try:
        os.chdir(folder or ".")
    except OSError as error:
        why = f"{folder} can't be entered on {socket.gethostname()} ({error.strerror})"
        raise RunFailed(f"{why}; share it with the cluster, or give --folder or --upload") from None


# --- nodes ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    """A node: `place` is how much of its output has come, `lost` why its actor is gone."""

    name: str
    address: str
    actor: Any
    place: int = 0
    code: int | None = None
    lost: str = ""


def _place(order: Order) -> Any:
    """Return a placement group with a bundle on each node, once it has its resources. Raises ConfigError."""
    import ray

    group = ray.util.placement_group([order["bundle"]] * order["nodes"], strategy="STRICT_SPREAD")
    began, noted = time.monotonic(), False
    while not group.wait(_POLL_S):
        seconds = time.monotonic() - began
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = [each for each in nodes if all(each.get(name, 0) >= n for name, n in order["bundle"].items())]
        wanted = f"{order['nodes']} nodes with {_resources(order['bundle'])} each"
        if len(fitting) < order["nodes"] and seconds >= order["wait"]:
            have = f"{len(fitting)} of {len(nodes)} fit ({'; '.join(sorted({_resources(each) for each in nodes}))})"
            remedy = "ask for less, or give --wait SECONDS if an autoscaler starts nodes"
            raise ConfigError(f"the run needs {wanted}, and {have}; {remedy}")
        if seconds >= _NOTED_S and not noted:
            noted = True
            echo(f"lockstep: waits for {wanted}, which {len(fitting)} nodes have when they are free", flush=True)
    return group


def _resources(amounts: Mapping[str, float]) -> str:
    ours = [name for name in amounts if not name.startswith(("node:", "memory", "object_store", "CPU_", "GPU_"))]
    return ", ".join(f"{amounts[name]:g} {name}" for name in sorted(ours)) or "no CPUs"


def _nodes(order: Order, group: Any) -> list[_Node]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from lockstep.launchers import ray_node

    ray.cloudpickle.register_pickle_by_value(ray_node)
    of_bundle = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    bundle = dict(order["bundle"])
    resources = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0), "resources": bundle}
    nodes = []
    for number in range(order["nodes"]):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {**resources, "scheduling_strategy": place, "max_restarts": 0, "max_concurrency": 4}
        known = by_id[of_bundle[number]]
        name = f"{known['NodeManagerHostname']}-{number}"
        actor = ray.remote(ray_node.NodeProcess).options(**options).remote()
        nodes.append(_Node(name, known["NodeManagerAddress"], actor))
    names = ", ".join(node.name for node in nodes)
    echo(f"lockstep: starts on {names}, with {_resources(order['bundle'])} each", flush=True)
    if "GPU" not in order["bundle"] and any(node["Resources"].get("GPU") for node in by_id.values()):
        echo("lockstep: this cluster has GPUs, and the run uses none; give --gpus-per-node N", flush=True)
    return nodes


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The command on all nodes; the first is node 0."""

    nodes: Sequence[_Node]
    grace: float
    stops: int = 0
    _signals: list[int] = field(default_factory=list)
    _logs: Path = Path()

    def start(self, order: Order, attempt: int) -> None:
        """Start the command on each node. Raises RunFailed."""
        import ray

        self._logs = Path(order["logs"])
        first, meeting = self.nodes[0], list[str]()
        try:
            if len(self.nodes) > 1:
                address = f"[{first.address}]" if ":" in first.address else first.address
                place = f"{address}:{ray.get(first.actor.free_port.remote())}"
                meeting = ["--nodes", str(len(self.nodes)), "--rendezvous", place]
                meeting += ["--job-id", f"{order['job']}.{attempt}"]
            variables = {**order["environment"], TOKEN: secrets.token_hex(32)}
            starts = []
            for rank, node in enumerate(self.nodes):
                words = [*shlex.split(order["program"]), *order["restart_words" if attempt else "words"], *meeting]
                words += ["--node-rank", str(rank)] if meeting else []
                starts.append(node.actor.start.remote(words, variables, order["folder"]))
            problems = dict(zip((node.name for node in self.nodes), ray.get(starts), strict=True))
        except ray.exceptions.RayError as error:
            raise RunFailed(f"Lockstep can't be started on the nodes: {_reason(error)}") from None
        failed = [f"\n  {name}: {why}" for name, why in problems.items() if why]
        if failed:
            self._tell(self.nodes, signal.SIGKILL)
            remedy = "install Lockstep there, or give its path with --program, and a folder that all nodes share"
            raise RunFailed(f"Lockstep can't be started on the nodes; {remedy}:{''.join(failed)}")

    def follow(self) -> int:
        """Print the output of node 0 until all have ended; return the run's exit code."""
        import ray

        ended: list[_Node] = []
        deadline, kills = float("inf"), False
        polls = {node.actor.poll.remote(0): node for node in self.nodes}
        with handled_signals(self._stop, self._save):
            while polls:
                for reply in ray.wait([*polls], timeout=_POLL_S)[0]:
                    node = polls.pop(reply)
                    self._receive(node, reply)
                    if node.code is None:
                        polls[node.actor.poll.remote(node.place)] = node
                        continue
                    ended.append(node)
                    if node is self.nodes[0] or node.code not in (0, Paused.exit_code):
                        deadline = min(deadline, time.monotonic() + _OTHERS_END_S)
                while self._signals:
                    self._tell(self.nodes[: 1 if self.stops <= 1 else None], self._signals.pop(0))
                if time.monotonic() > deadline:
                    self._tell([*polls.values()], signal.SIGKILL if kills else signal.SIGTERM)
                    deadline, kills = time.monotonic() + self.grace + _KILLED_S, True
        first, leader = ended[0], self.nodes[0]
        failed = first if kills and first.code not in (0, Paused.exit_code) else leader
        return failed.code or 0

    def _receive(self, node: _Node, reply: Any) -> None:
        import ray

        try:
            data, node.code = ray.get(reply)
        except ray.exceptions.ActorUnavailableError:  # the network fails for a moment
            time.sleep(_POLL_S)
            return
        except ray.exceptions.RayError as error:
            node.code, node.lost = RunFailed.exit_code, _reason(error)
            echo(f"lockstep: the connection to {node.name} is lost: {node.lost}", flush=True)
            return
        node.place += len(data)
        node.code = 128 - node.code if node.code is not None and node.code < 0 else node.code
        if node is self.nodes[0]:
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            return
        with suppress(OSError), (self._logs / f"{node.name}.log").open("ab") as file:
            file.write(data)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        self._save(number, frame)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(int(number))

    def _tell(self, nodes: Sequence[_Node], number: int) -> None:
        for node in nodes:
            node.actor.signal.remote(int(number))


def _reason(error: Exception) -> str:
    """Return why an actor can't be called, without Ray's page about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    has_failed = any("node" in line and ("died" in line or "dead" in line or "terminated" in line) for line in lines)
    return "its node has failed or left the cluster" if has_failed else f"Ray has ended its actor ({lines[-1]})"
