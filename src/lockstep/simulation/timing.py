"""The time of a step on a GPU: a trace, replayed with that GPU's speeds.

    operation    launch + max(FLOPs / (peak x reached for its shape), bytes / (bandwidth x reached))
                 on its stream, after the operation before it, and not before the host has issued it
    offloading   a copy: bytes / PCIe's, on its stream; the host's update: bytes / its memory's, then Python continues
    collective   steps from rank to rank + bytes / bandwidth of the slowest link; after the collective before it
    host         some microseconds for each operation; where it reads a value, it waits

The roofline: Williams et al., 2009. A product of matrices fills the multiprocessors in waves of tiles, so its share of
the peak depends on its shape. A ring moves (N - 1) / N of the bytes, twice for an all-reduce (nccl-tests).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lockstep.plan.gpus import GPU, GPUCluster
from lockstep.simulation.trace import OnHost, Operation, Order, Sent, StepTrace

Share = Literal["matmul", "attention", "memory", "optimizer", "communication", "host", "bubble"]
SHARES: tuple[Share, ...] = get_args(Share)
"""Parts of a step's time.

memory          operations that only move bytes
communication   collectives, and copies between the host and the GPU, that nothing hides
optimizer       norm and step, also on the host
host            the GPU waits for Python
bubble          a pipeline's first and last micro-batches, in which other stages wait
"""

_TILE = 128  # rows and columns of a product that one multiprocessor computes at a time
_DEEP = 64  # of k: where half of the time of a tile is its beginning and end
_LAUNCH = 3e-6  # seconds, of a kernel
_CALL = 6e-6  # of the host, for an operation with a kernel
_ISSUE = 1.5e-6  # for one without
_SLOWED = 0.4  # of the time that a collective runs beside operations: it takes multiprocessors and bandwidth from them
_HOP = 1e-5  # of a collective's step from rank to rank
_NEARNESS = 3  # of measured sizes: the power of the squared distance
_PAIRS = ("send", "receive")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted time of a step.

    Attributes:
        seconds: Of the whole step.
        parts: Seconds by part; they sum up to the step.
        hidden: Seconds of collectives beside operations.
        flops: Of this rank's forwards and backwards, without what is computed again.
        mfu: The share of the GPU's peak that these are (model FLOPs utilization: Chowdhery et al., 2022, appendix B).
    """

    seconds: float
    parts: Mapping[Share, float]
    hidden: float
    flops: float
    mfu: float

    def as_json(self) -> dict[str, float]:
        """Return it for programs: seconds by part, and the MFU."""
        parts = {f"{part}_seconds": seconds for part, seconds in self.parts.items()}
        return {"step_seconds": self.seconds, **parts, "hidden_seconds": self.hidden, "mfu": self.mfu}


@dataclass(slots=True)
class _Replay:
    cluster: GPUCluster
    host: float = 0.0
    streams: dict[int, float] = field(default_factory=dict)
    events: dict[int, float] = field(default_factory=dict)
    network: float = 0.0
    collected: float = 0.0  # the end of the last asynchronous collective
    busy: Counter[Share] = field(default_factory=Counter)
    sent: float = 0.0
    copied: float = 0.0  # between the host and the GPU
    updating: float = 0.0  # of the host, in the optimizer's step
    computing: float = 0.0  # the end of the last operation
    waited: float = 0.0  # of streams that compute, for the host
    flops: float = 0.0
    width: int = 4  # bytes of an element in the products
    forwards: list[float] = field(default_factory=list)

    def run(self, trace: StepTrace) -> None:
        seconds_of = self.cluster.gpu.seconds
        call, sent = (seconds_of.get(name, _CALL) for name in ("call", "collective"))
        self.host += seconds_of.get("step", 0.0)
        for entry in trace.entries:
            now = self.streams.get(entry.stream, 0.0)
            if isinstance(entry, Operation):
                self.host += call
                begin = max(now, self.host)
                seconds = operation_seconds(entry, self.cluster.gpu)
                self.busy[entry.part] += seconds
                self.waited += max(0.0, self.host - max(now, self.computing))
                self.streams[entry.stream] = begin + seconds
                self.computing = max(self.computing, begin + seconds)
                if self.cluster.gpu.device == "cpu":
                    self.host = self.computing
                self.flops += entry.model_flops
                self.width = min(self.width, entry.width) if entry.flops else self.width
            elif isinstance(entry, Sent):
                late = seconds_of.get("late", 0.0) * max(0.0, self.host - self.network)
                self.host += call if entry.asynchronous else sent + late
                begin = max(now, self.network, self.host)
                seconds = collective_seconds(entry, self.cluster)
                self.network = begin + seconds
                self.sent += seconds
                if entry.asynchronous:
                    self.collected = max(self.collected, self.network)
                else:
                    self.streams[entry.stream] = self.network
            elif isinstance(entry, OnHost):
                self._on_host(entry, now)
            else:
                self._order(entry, now)

    def _on_host(self, entry: OnHost, now: float) -> None:
        gpu = self.cluster.gpu
        if entry.copies:
            self.host += gpu.seconds.get("call", _CALL)
            seconds = _LAUNCH + entry.bytes / gpu.pcie
            self.copied += seconds
            self.streams[entry.stream] = max(now, self.host) + seconds
            return
        seconds = entry.bytes / gpu.host
        self.host += seconds
        if entry.in_optimizer:
            self.updating += seconds
            self.computing = max(self.computing, self.host)

    def _order(self, entry: Order, now: float) -> None:
        match entry.what:
            case "record":
                self.events[entry.event] = now
            case "wait":
                self.streams[entry.stream] = max(now, self.events.get(entry.event, 0.0))
            case "issue":
                self.host += self.cluster.gpu.seconds.get("issue", _ISSUE)
            case "join":
                self.streams[entry.stream] = max(now, self.collected)
            case "read":
                self.host = max(
                    self.host, self.events.get(entry.event, 0.0) if entry.event else max(now, self.collected)
                )
            case "forward":
                self.forwards.append(max(now, self.host))

    @property
    def end(self) -> float:
        return max([self.host, self.network, *self.streams.values()])


def step_time(trace: StepTrace, cluster: GPUCluster, micro_batches: int, stages: int = 1) -> StepTime:
    """Return the time of a step of N micro-batches; the trace may have fewer of them."""
    replay = _Replay(cluster)
    replay.run(trace)
    in_trace, times = trace.micro_batches, replay.forwards
    end = max(replay.end, sum(replay.busy.values()))  # streams share the GPU
    optimizer = replay.busy["optimizer"] + replay.updating
    repeated = (end - optimizer) / in_trace if stages > 1 or len(times) < 2 else times[1] - times[0]
    more, bubble = micro_batches - in_trace, repeated * (stages - 1)
    seconds, scale = end + more * repeated + bubble, micro_batches / in_trace
    parts: dict[Share, float] = dict.fromkeys(SHARES, 0.0) | {"bubble": bubble}
    for part, busy in replay.busy.items():
        parts[part] = optimizer if part == "optimizer" else busy * scale
    rest = max(0.0, seconds - sum(parts.values()))
    parts["host"] = min(rest, replay.waited * scale)
    exposed = rest - parts["host"]
    hidden = max(0.0, replay.sent * scale - max(0.0, exposed - replay.copied * scale))
    parts["communication"] = exposed + _SLOWED * hidden
    seconds += _SLOWED * hidden
    flops = replay.flops * scale
    return StepTime(seconds, parts, hidden, flops, flops / seconds / cluster.gpu.flops[replay.width])


def operation_seconds(operation: Operation, gpu: GPU) -> float:
    """Return the seconds of an operation on a GPU."""
    if rows := gpu.measured.get(operation.name) or (not operation.flops and gpu.measured.get(f"mul {operation.width}")):
        return operation.times * measured_seconds(rows, operation.sizes) / gpu.reached.get("measured", 1.0)
    moved = operation.bytes / (gpu.bandwidth * gpu.reached["memory"])
    if not operation.flops:
        return moved + _LAUNCH
    peak = gpu.flops[min(max(operation.width, 1), 4)]
    if operation.part == "attention":
        reached = gpu.reached["attention"]
    else:
        reached = gpu.reached["matmul"] * (1.0 if operation.shape is None else shape_efficiency(operation.shape, gpu))
    return max(operation.flops / (peak * reached), moved) + _LAUNCH


def measured_seconds(rows: Sequence[Sequence[float]], sizes: Sequence[float]) -> float:
    """Return the seconds for sizes between measured ones.

    The rate (the product of the sizes in a second) is the mean of the neighbors', in logarithms, weighted by distance.
    """
    at = [math.log2(max(size, 1)) for size in sizes]
    total = sum_ = 0.0
    for *known, seconds in rows:
        distance = sum((math.log2(size) - here) ** 2 for size, here in zip(known, at, strict=True))
        weight = 1 / (distance**_NEARNESS + 1e-9)
        total, sum_ = total + weight, sum_ + weight * math.log(math.prod(known) / seconds)
    return max(math.prod(sizes) / math.exp(sum_ / total), min(seconds for *_, seconds in rows))


def shape_efficiency(shape: tuple[int, int, int, int], gpu: GPU) -> float:
    """Return the share of its speed that a GPU can have in a product [batch, m, n, k]: of tiles, waves, and depth."""
    batch, m, n, k = shape
    tiles = batch * math.ceil(m / _TILE) * math.ceil(n / _TILE)
    filled = batch * m * n / (_TILE * _TILE * tiles)
    waves = tiles / gpu.multiprocessors
    return filled * waves / math.ceil(waves) * k / (k + _DEEP)


def collective_seconds(sent: Sent, cluster: GPUCluster) -> float:
    """Return the seconds of a collective: its steps from rank to rank, and a ring's bytes over the slowest link."""
    gpu, ranks = cluster.gpu, len(sent.ranks)
    if ranks <= cluster.per_node and (rows := gpu.measured.get(f"{sent.name} {ranks}")):
        return measured_seconds(rows, (sent.bytes,))
    nodes = len({rank // cluster.per_node for rank in sent.ranks})
    link = gpu.link * gpu.reached["link"]
    if nodes > 1:  # each GPU of a node has a network card of its own
        link = min(link, gpu.network * gpu.reached["network"] * (1 if sent.name in _PAIRS else -(-ranks // nodes)))
    if sent.name in _PAIRS:
        return _HOP + sent.bytes / link
    moved = sent.bytes * (ranks - 1) / ranks * (2 if sent.name == "all_reduce" else 1)
    return _HOP * (1 + math.log2(ranks)) + moved / link
