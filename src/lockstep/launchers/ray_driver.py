"""The entrypoint of a Ray job: places one actor on each node, has each start Lockstep there, and follows the run.

    job -- lockstep launch on-ray ORDER     placement group, STRICT_SPREAD: a bundle on each node
             actor on each node --> `lockstep launch at-host`   checked side by side, then `lockstep train ...`

The exit code is that of the run. SIGTERM, which a stopped job gets, stops all nodes, saved.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.stopping import stop_at_once
from lockstep.core.terminal import echo, plain
from lockstep.launch.meeting import TOKEN
from lockstep.launchers.host_checks import Wanted, check_hosts
from lockstep.launchers.host_connection import HostConnection
from lockstep.launchers.host_run import RemoteRun
from lockstep.launchers.ray_process import RayProcess

STARTS = "lockstep: starts on"
WAITS = "lockstep: waits for"
"""Begin the first line of a job's output, once its nodes are found or waited for."""
_POLL_S = 0.5
_NOTED_S = 2.0
_SHORT_ID = 6
_RAYS_THREAD = "ray_listen_error_messages"

Order = Mapping[str, Any]


def drive(text: str) -> int:
    """Run an order's command on the nodes of this cluster, and return its exit code.

    Args:
        text: The order as JSON: what the launcher wrote into `ray.json`.

    Raises:
        Failure: The cluster hasn't the nodes, or a node can't take part.
    """
    os.environ["RAY_DEDUP_LOGS"] = "0"  # what Ray collects, it prints at the end
    try:
        import ray
    except ImportError:
        raise RunFailed(f"{sys.executable} has no Ray; install the cluster's version of it there") from None
    order: Order = json.loads(text)
    if order["folder"] is not None:
        _enter(order["folder"])
    sys.stdout = cast("TextIO", _Own(sys.stdout))
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (RuntimeError, OSError, ValueError) as error:
        message = plain(" ".join(str(error).split()))
        raise RunFailed(f"Ray of {sys.executable} can't join this cluster: {message}") from None
    stop_at_once()  # Ray has set handlers of its own
    for attempt in range(order["retries"] + 1):
        group = _place(order)
        run = _started(order, _connect(order, group), attempt)
        code = run.follow()
        lost = {each.host: why for each in run.connections if (why := each.process.why_lost("")) is not None}
        for host in [host for host in lost if host not in run.lost]:
            echo(f"lockstep: the connection to {host} is lost: {lost[host]}", flush=True)
        ray.util.remove_placement_group(group)
        if code == 0 or run.was_stopped or not lost or attempt == order["retries"]:
            return code
        echo(f"lockstep: starts again without {', '.join(lost)}, retry {attempt + 1} of {order['retries']}", flush=True)
    raise AssertionError("the last attempt returns")


class _Own:
    """The output of this job without Ray's pages on what has ended in the cluster: a lost node is named anyway."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name == _RAYS_THREAD:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        why = f"{folder} can't be entered on {socket.gethostname()}, where the job's driver runs ({error.strerror})"
        raise RunFailed(f"{why}; share it with the cluster, or give --folder or --upload") from None


# --- nodes ----------------------------------------------------------------------------------------------------------


def _place(order: Order) -> Any:
    """Return a placement group with a bundle on each node, once it has its resources. Raises ConfigError."""
    import ray

    group = ray.util.placement_group([order["bundle"]] * order["nodes"], strategy="STRICT_SPREAD")
    began, noted = time.monotonic(), False
    while not group.wait(_POLL_S):
        seconds = time.monotonic() - began
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = [each for each in nodes if all(each.get(name, 0) >= n for name, n in order["bundle"].items())]
        if len(fitting) < order["nodes"] and seconds >= order["wait"]:
            raise ConfigError(_too_few(order, nodes, len(fitting)))
        if seconds >= _NOTED_S and not noted:
            noted = True
            why = f"{len(fitting)} of this cluster's nodes have that, when they are free"
            echo(f"{WAITS} {order['nodes']} nodes with {_resources(order['bundle'])} each; {why}", flush=True)
    return group


def _too_few(order: Order, nodes: Sequence[Mapping[str, float]], fitting: int) -> str:
    have = "; ".join(sorted({_resources(each) for each in nodes}))
    waited = f" after {order['wait']:g} s" if order["wait"] else ""
    return (
        f"--nodes {order['nodes']} needs as many nodes with {_resources(order['bundle'])} each, and {fitting} of this "
        f"cluster's {len(nodes)} nodes fit{waited} (they have {have}); ask for less, or give --wait SECONDS if an "
        "autoscaler starts nodes"
    )


def _resources(amounts: Mapping[str, float]) -> str:
    shown = [f"{amounts[name]:g} {name}{'s' * (amounts[name] != 1)}" for name in ("CPU", "GPU") if amounts.get(name)]
    own = [name for name in amounts if not name.startswith(("CPU", "GPU", "node:", "memory", "object_store"))]
    return ", ".join([*shown, *(f"{amounts[name]:g} {name}" for name in sorted(own))]) or "no CPUs"


def _connect(order: Order, group: Any) -> list[HostConnection]:
    """Start an actor on each node, and Lockstep's process by it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from lockstep.launchers import ray_node

    ray.cloudpickle.register_pickle_by_value(ray_node)
    of_bundle = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    nodes = [by_id[of_bundle[number]] for number in range(order["nodes"])]
    bundle = dict(order["bundle"])
    resources = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0), "resources": bundle}
    words = [*shlex.split(order["program"]), "launch", "at-host"]
    actors = []
    for number in range(order["nodes"]):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {**resources, "scheduling_strategy": place, "max_restarts": 0, "max_concurrency": 8}
        actors.append(ray.remote(ray_node.NodeProcess).options(**options).remote(words))
    ready = [actor.is_ready.remote() for actor in actors]
    ray.wait(ready, num_returns=len(ready))  # if one fails, so does its process
    names = _names(nodes)
    echo(f"{STARTS} {', '.join(names)}, with {_resources(order['bundle'])} each", flush=True)
    if "GPU" not in order["bundle"] and any(node["Resources"].get("GPU") for node in nodes):
        echo("lockstep: these nodes have GPUs, and the run uses none; give --gpus-per-node N", flush=True)
    return [
        HostConnection(name, RayProcess(actor, order["program"]), (node["NodeManagerAddress"],))
        for name, actor, node in zip(names, actors, nodes, strict=True)
    ]


def _names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each node, its hostname if no other has the same."""
    for names in (
        [str(node["NodeManagerHostname"]) for node in nodes],
        [str(node["NodeManagerAddress"]) for node in nodes],
        [f"{node['NodeManagerHostname']}-{node['NodeID'][:_SHORT_ID]}" for node in nodes],
    ):
        if len({*names}) == len(names):
            return names
    return [str(node["NodeID"]) for node in nodes]


# --- the run --------------------------------------------------------------------------------------------------------


def _started(order: Order, connections: Sequence[HostConnection], attempt: int) -> RemoteRun:
    """Check all nodes, and start the command on each. Raises RunFailed."""
    rendezvous = check_hosts(connections, Wanted(order["folder"] or ".", tuple(order["shared"])))
    environment = {**order["environment"], TOKEN: secrets.token_hex(32)}
    for node, connection in enumerate(connections):
        place: list[str] = []
        if rendezvous is not None:
            place += ["--nodes", str(len(connections)), "--rendezvous", rendezvous, "--node-rank", str(node)]
            place += ["--job-id", f"{order['job']}.{attempt}"]
        words, restart = [*order["words"], *place], [*order["restart_words"], *place]
        start = {"words": words, "restart_words": restart, "environment": environment, "grace": order["grace"]}
        connection.send("start", **start)
    logs = [Path(order["logs"], f"{connection.host}.log") for connection in connections]
    return RemoteRun(connections, logs, order["grace"])
