"""A real Ray cluster for tests: nodes on this machine, each with CPUs and GPUs that it only claims to have.

    head     GCS, dashboard, Jobs API, raylet        node     raylet        `remove` kills a node's processes

A process of its own starts it, and ends it when the test ends or dies. `why_not` returns what is missing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

CPUS, GPUS = 1, 2  # of each node

_CODE = """\
import json, logging, sys
from ray.cluster_utils import Cluster
folder, port, cpus, gpus = sys.argv[1], *map(int, sys.argv[2:])
common = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 80 << 20, "temp_dir": folder}
common["include_log_monitor"] = False
head = {"include_dashboard": bool(port), "dashboard_host": "127.0.0.1", "dashboard_port": port or None}
cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
nodes = [cluster.add_node(**common)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "add\\n":
        nodes.append(cluster.add_node(**common))
        cluster.wait_for_nodes()
    elif line == "remove\\n":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


def why_not() -> str | None:
    """Why no Ray cluster can be brought up here; None if it can."""
    if find_spec("ray") is None or find_spec("aiohttp") is None:
        return "needs Ray and its dashboard, which `make drill` installs"
    return None


@dataclass(frozen=True)
class RayCluster:
    """`address`: of its dashboard; `nodes`: where its nodes meet."""

    address: str
    nodes: str
    _process: subprocess.Popen[str]

    def do(self, what: str) -> None:
        """`add` or `remove` a node beside the head."""
        print(what, file=_stdin(self._process), flush=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def ray_cluster(*, dashboard: bool = True) -> Iterator[RayCluster]:
    """Brings a cluster of two nodes up in some seconds, and ends it."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets need a short path
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # where Ray notes its newest cluster, whatever its folder
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] if dashboard else 0
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
    environment["RAY_memory_monitor_refresh_ms"] = "0"  # of the whole machine: other tests' memory would end the nodes
    words = [sys.executable, "-c", _CODE, folder, str(port), str(CPUS), str(GPUS)]
    pipe = subprocess.PIPE
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, env=environment, text=True)
    try:
        assert process.stdout is not None
        nodes = process.stdout.readline().strip()
        assert nodes, Path(folder, "log").read_text()
        yield RayCluster(f"http://127.0.0.1:{port}", nodes, process)
    finally:
        _stdin(process).close()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _stdin(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin
