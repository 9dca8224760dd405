"""Fails ranks and nodes of runs under torchrun, and checks that all meet again: `python drills/elastic_drill.py`.

    torchrun, node 0 --- ranks 0, 1 --.                          kill a rank, a node, two one after the other,
    torchrun, node 1 --- rank 2 ------'-- one run                all nodes; let a node join or leave
    lockstep train on one rank, undisturbed                      its losses are those that the run must have

Each plan launches an agent of torchrun for each node, on this machine, and fails something once the run has saved. The
agents must end with exit code 0 within `--limit` seconds. The last checkpoint must be of as many ranks as the plan
leaves, and the history have every update once, with the loss of the undisturbed run (`determinism: invariant`); where
rank 0 is killed, up to three lines that it hadn't written yet may be missing, as `lockstep chaos` allows.

Prints a table, writes results/elastic_drill.json, and fails (exit code 1) if a plan failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from attempts import history, machine, manifest_of, newest

RESULTS = Path(__file__).parent / "results"
STEPS, FIRST = 400, 20  # updates of a run, and after which something fails
_UNWRITTEN = 3  # lines of metrics.jsonl that rank 0 has not written when it is killed
CONFIG = f"""
model: {{kind: image-classifier, layers: 2, width: 16}}
data:
  train: {{kind: digits, split: train, shift: 1}}
batch: {{global_size: 48, micro_size: 4}}
optim: {{name: adamw, lr: 3e-3}}
checkpoint: {{every: 5 steps}}
launch: {{device: cpu, timeout: 60}}
monitor: {{tensorboard: false, progress: none, every: 1}}
run: {{steps: {STEPS}, determinism: invariant}}
"""
_TRAIN = ("lockstep", "train", "toy.yaml", "run.folder=run")


class Failed(Exception):
    """Raised with what a plan expected in vain."""


class Launch:
    """The agents of one launch, and their ranks."""

    def __init__(self, folder: Path, plan: Plan, limit: float) -> None:
        self.folder, self.nodes, self.deadline = folder, plan.nodes, time.monotonic() + limit
        self.unwritten = 0  # lines of metrics.jsonl that may be missing
        self._number = f"{plan.at_least or len(plan.nodes)}:{len(plan.nodes)}"
        self._variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(plan.own_store))}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._meeting = {
            "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"],
            "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        }[plan.rendezvous]
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "toy.yaml").write_text(CONFIG)

    def start(self, *nodes: int) -> None:
        for node in nodes:
            words = [
                f"--nnodes={self._number}", f"--node-rank={node}", f"--nproc-per-node={self.nodes[node]}",
                "--max-restarts=6", "--monitor-interval=0.5", "--rdzv-id=4711", *self._meeting,
                f"--rdzv-conf=last_call_timeout=5,is_host={int(node == 0)}",  # else any: all are on one host
            ]  # fmt: skip
            command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", *_TRAIN]
            with (self.folder / f"node-{node}.log").open("a") as log:
                self._agents[node] = subprocess.Popen(
                    command, env=self._variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                    start_new_session=True,
                )  # fmt: skip

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that lives."""
        ranks = {}
        for agent in self._agents.values():
            for process in _children(agent.pid):
                variables = _environment(process)
                if b"RANK" in variables:
                    ranks[int(variables[b"RANK"])] = process
        return ranks

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        while not condition():
            if time.monotonic() > self.deadline:
                raise Failed(f"{what}: not within the limit")
            time.sleep(0.05)

    def wait_for_updates(self, number: int = FIRST) -> None:
        def saved() -> bool:
            ended = [node for node, agent in self._agents.items() if agent.poll() is not None]
            if len(ended) == len(self._agents):
                raise Failed(f"the run ended before update {number}")
            return newest(self.folder / "run") >= number

        self.wait(f"a checkpoint of update {number}", saved)

    def kill_rank(self, rank: int) -> int:
        """Kill a rank, once it lives; return its process."""
        self.wait(f"a process of rank {rank}", lambda: rank in self.ranks())
        process = self.ranks()[rank]
        self.unwritten += 0 if rank else _UNWRITTEN
        os.kill(process, signal.SIGKILL)
        return process

    def kill_node(self, node: int) -> None:
        """Kill a node's agent and its ranks, as a machine that fails."""
        agent = self._agents.pop(node)
        processes = _children(agent.pid)
        self.unwritten += 0 if node else _UNWRITTEN
        agent.kill()
        agent.wait()
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def wait_for_end(self) -> list[int]:
        """Wait until all agents have ended; return their exit codes, and forget them."""
        agents, self._agents = self._agents, {}
        try:
            return [agent.wait(max(1.0, self.deadline - time.monotonic())) for agent in agents.values()]
        except subprocess.TimeoutExpired:
            self._agents = agents
            raise Failed(f"the agents have not ended; ranks {sorted(self.ranks())} live") from None

    def end(self) -> None:
        """Kill what is left."""
        for node in list(self._agents):
            self.kill_node(node)

    def output(self) -> str:
        """Return the last lines of each node's output."""
        logs = sorted(self.folder.glob("node-*.log"))
        return "\n".join(f"{log.name}: ...{log.read_text(errors='replace')[-1500:]}" for log in logs)


def _children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _environment(process: int) -> dict[bytes, bytes]:
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(word.split(b"=", 1) for word in words if b"=" in word)  # type: ignore[misc]


# --- what fails ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is launched, and what fails.

    Attributes:
        act: Called with the launch, of which it starts the nodes.
        nodes: The number of ranks of each node.
        at_least: The number of nodes that suffice; None: all.
        ranks: The number of ranks at the end; None: that of the launch.
        own_store: Whether ranks have a store of their own. torchrun's has no address for nodes that come later (torch
            2.13): they wait for it until their time is over.
    """

    what: str
    rendezvous: str
    act: Callable[[Launch], None]
    nodes: Sequence[int] = (1, 1)
    at_least: int | None = None
    ranks: int | None = None
    own_store: bool = False


def _kill(*ranks: int) -> Callable[[Launch], None]:
    def act(launch: Launch) -> None:
        launch.start(*range(len(launch.nodes)))
        launch.wait_for_updates()
        for rank in ranks:
            launch.kill_rank(rank)

    return act


def _kill_one_after_another(first: int, second: int) -> Callable[[Launch], None]:
    """Kill a rank, and another as soon as it is started again."""

    def act(launch: Launch) -> None:
        _kill()(launch)
        before = launch.ranks()[second]
        launch.kill_rank(first)
        launch.wait(f"a new rank {second}", lambda: launch.ranks().get(second, before) != before)
        launch.kill_rank(second)

    return act


def _kill_twice(rank: int) -> Callable[[Launch], None]:
    """Kill a rank, and again after more updates."""

    def act(launch: Launch) -> None:
        _kill(rank)(launch)
        launch.wait_for_updates(newest(launch.folder / "run") + 2 * FIRST)
        launch.kill_rank(rank)

    return act


def _restart_node(launch: Launch) -> None:
    """Kill a node, and start it again when the other has noticed."""
    _kill()(launch)
    before = launch.ranks()[0]
    launch.kill_node(1)
    launch.wait("the end of rank 0", lambda: launch.ranks().get(0) != before)
    launch.start(1)


def _restart_all(launch: Launch) -> None:
    _kill()(launch)
    launch.kill_node(1)
    launch.kill_node(0)
    launch.start(0, 1)


def _start_late(launch: Launch) -> None:
    launch.start(0)
    time.sleep(15.0)
    launch.start(1)
    launch.wait_for_updates()
    launch.kill_rank(1)


def _join(launch: Launch) -> None:
    launch.start(0, 1)
    launch.wait_for_updates()
    launch.start(2)


def _leave(launch: Launch) -> None:
    _kill()(launch)
    launch.kill_node(2)


PLANS = (
    Plan("rank 1 is killed", "c10d", _kill(1)),
    Plan("rank 0 is killed", "c10d", _kill(0)),
    Plan("rank 0 is killed", "static", _kill(0)),
    Plan("a rank of each node is killed", "static", _kill(1, 3), (2, 2)),
    Plan("rank 1, then rank 0 as it starts again", "c10d", _kill_one_after_another(1, 0)),
    Plan("rank 2, then rank 0 as it starts again", "static", _kill_one_after_another(2, 0), (1, 2)),
    Plan("rank 2 twice", "c10d", _kill_twice(2), (2, 1)),
    Plan("a node is killed and started again", "c10d", _restart_node, own_store=True),
    Plan("all nodes are started again", "c10d", _restart_all),
    Plan("the second node comes late; rank 1 is killed", "c10d", _start_late),
    Plan("a third node joins", "c10d", _join, (1, 1, 1), 2, 3, own_store=True),
    Plan("one of three nodes is lost", "c10d", _leave, (1, 1, 1), 2, 2),
)


# --- verdicts -----------------------------------------------------------------------------------------------------


@cache
def undisturbed() -> list[tuple[int, float]]:
    """Return steps and losses of a run in which nothing fails."""
    with tempfile.TemporaryDirectory(prefix="drill-elastic-") as folder:
        Path(folder, "toy.yaml").write_text(CONFIG)
        command = [sys.executable, "-m", *_TRAIN, "--ranks=1"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        return history(Path(folder, "run"))


@dataclass
class Outcome:
    plan: str
    rendezvous: str
    ranks: str
    seconds: float = 0.0
    fault: str = ""
    output: str = field(default="", repr=False)


def attempt(plan: Plan, limit: float) -> Outcome:
    outcome = Outcome(plan.what, plan.rendezvous, " + ".join(map(str, plan.nodes)))
    expected = dict(undisturbed())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drill-elastic-") as folder:
        launch = Launch(Path(folder), plan, limit)
        try:
            plan.act(launch)
            codes = launch.wait_for_end()
            if any(codes):
                raise Failed(f"the agents ended with exit codes {codes}")
            if (ranks := manifest_of(launch.folder / "run").ranks) != (plan.ranks or sum(plan.nodes)):
                raise Failed(f"the last checkpoint is of {ranks} ranks")
            losses = history(launch.folder / "run")
            if differ := [step for step, loss in losses if loss != expected.get(step)]:
                raise Failed(f"the loss of update {differ[0]} differs")
            if len(dict(losses)) < len(losses) or len(expected) - len(losses) > launch.unwritten:
                raise Failed(f"{len(losses)} losses, of {len(dict(losses))} of {len(expected)} updates")
        except Failed as error:
            outcome.fault, outcome.output = str(error), launch.output()
        finally:
            launch.end()
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, nargs="+", default=list(range(1, len(PLANS) + 1)), metavar="NUMBER")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a plan may take")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    outcomes = []
    for number in arguments.plans:
        outcomes.append(attempt(PLANS[number - 1], arguments.limit))
        print(f"  {number}: {outcomes[-1]}\n{outcomes[-1].output}".rstrip(), file=sys.stderr, flush=True)
    rows = [{key: value for key, value in vars(outcome).items() if key != "output"} for outcome in outcomes]
    results = {"command": "python drills/elastic_drill.py", "machine": machine(), "rows": rows}
    if len(outcomes) == len(PLANS):
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / "elastic_drill.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(results), flush=True)
    sys.exit(1 if any(outcome.fault for outcome in outcomes) else 0)


def table(results: Mapping[str, Any]) -> str:
    lines = ["| what fails | rendezvous | ranks of each node | result | seconds |", "|---|---|---|---|--:|"]
    for row in results["rows"]:
        result = row["fault"] or "all met again, the same losses"
        lines.append(f"| {row['plan']} | {row['rendezvous']} | {row['ranks']} | {result} | {row['seconds']:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
