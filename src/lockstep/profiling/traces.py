"""Reads traces: the phases of the clock, the operators of torch, the collectives, the kernels of a GPU.

host    cudaLaunchKernel (correlation 7) ... cudaStreamSynchronize
GPU              delay  | kernel (correlation 7) | idle |  ncclDevKernel_AllReduce (exposed where nothing computes)
"""

from __future__ import annotations

import gzip
import json
import statistics
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lockstep.core.collective_names import OPERATIONS, bus_factor
from lockstep.core.errors import RunFailed
from lockstep.monitor.trace_requests import PROFILE, TRACE_SUFFIX

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, merged where they overlap or touch."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return where two merged lists of intervals overlap."""
    shared, place = [], 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        for other_begin, other_end in second[place:]:
            if other_begin >= end:
                break
            shared.append((max(begin, other_begin), min(end, other_end)))
    return shared


def gaps(intervals: Sequence[Interval], whole: Interval) -> list[Interval]:
    """Return what merged intervals leave of a whole."""
    begins = [whole[0], *(end for _, end in intervals)]
    ends = [*(begin for begin, _ in intervals), whole[1]]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if end > begin]


Event = Mapping[str, Any]
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_READS = "aten::_local_scalar_dense"
_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "BFloat16": 2}
_BYTES |= {"Float": 4, "Double": 8, "Half": 2, "Long": 8, "Int": 4, "unsigned char": 1, "Byte": 1}
_SMALL_S = 20e-6
_CLOSE_S = 5 * _SMALL_S  # between operators, by the calls around them
_COMPUTE = ("forward", "backward", "optimizer")
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's calls and seconds in an update, without the operators that it calls."""

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """A collective's calls, bytes and seconds in an update; `bandwidth` is the bus bandwidth, in bytes per second."""

    name: str
    calls: float
    size: float
    seconds: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a GPU, in seconds of an update.

    Attributes:
        busy: Share of the time that it computes.
        idle: It does nothing, not even communicate or copy.
        stalled: It is idle while the host waits for data.
        exposed: It communicates and computes nothing.
        delay: Median from a kernel's launch to its start: short if the GPU waits for the host.
        syncs: Calls in forward and backward that make the host wait for the GPU, `sync_seconds` in all.
    """

    busy: float
    idle: float
    stalled: float
    exposed: float
    delay: float
    syncs: float
    sync_seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one rank; all numbers are means over its updates.

    Attributes:
        facts: The object "lockstep" of the file.
        seconds: Of an update; `split` by phase.
        operators: By their own seconds, or their kernels', the longest first.
        calls: Number of operators that call no others.
        small: Seconds of those that usually take less than 20 us, with the short gaps between operators.
        outside: Seconds by phase in longer gaps; on a GPU, only where it is idle, too.
        reads: Times that forward and backward read a tensor's number on the host.
        overlap: Share of the collectives' time that is hidden behind computation; None: there are none.
    """

    path: Path
    facts: Mapping[str, Any]
    updates: int
    seconds: float
    split: Mapping[str, float]
    operators: Sequence[Operator]
    calls: float
    small: float
    outside: Mapping[str, float]
    reads: float
    collectives: Sequence[CollectiveUse]
    device: DeviceUse | None
    overlap: float | None

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    def share(self, phase: str) -> float:
        return self.split.get(phase, 0.0) / self.seconds

    @property
    def queued(self) -> float:
        """Seconds of an update that the rank's main thread waits for a core."""
        return float(self.facts.get("waited_for_core", 0.0)) / self.updates

    @property
    def computing(self) -> float:
        """Seconds of an update without waiting for other ranks."""
        return self.seconds - self.split.get("communication", 0.0)


def trace_files(run: Path) -> list[Path]:
    """Return the traces of a run, by rank and first update."""

    def key(path: Path) -> tuple[int, int]:
        rank, first = path.name.removesuffix(TRACE_SUFFIX).removeprefix("rank").split(".")
        return int(first), int(rank)

    return sorted((run / PROFILE).glob(f"rank*.*{TRACE_SUFFIX}"), key=key)


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises RunFailed if the file is none of Lockstep's, or is damaged."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        return _trace(path, content["lockstep"], content["traceEvents"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise RunFailed(f"{path} is no trace that Lockstep has written: {error!r}; record it again") from error


def _trace(path: Path, facts: Mapping[str, Any], events: list[Event]) -> Trace:
    slices = [event for event in events if event.get("ph") == "X" and "dur" in event]
    own = [event for event in slices if event.get("cat") == "lockstep"]
    updates = [_interval_of(event) for event in own if event["name"].startswith("lockstep/update ")]
    if not updates:
        raise ValueError("it has no whole update")
    whole, count = (updates[0][0], updates[-1][1]), len(updates)
    phases = sorted((event["ts"], event["name"].removeprefix("lockstep/")) for event in own if event["args"] == {})
    inside = [event for event in slices if whole[0] <= event["ts"] < whole[1]]
    operators = [event for event in inside if event.get("cat") == "cpu_op"]
    kernels = [event for event in inside if event.get("cat") in _KERNELS]
    leaves, own_times = _own_times(operators)
    reads = [event for event in operators if event["name"] == _READS]
    names = _kernel_times(inside) if kernels else own_times
    computing = [event for event in kernels if not _is_communication(event)]
    spans: dict[str, list[Interval]] = defaultdict(list)
    for event in own:
        if event["args"] == {}:
            spans[event["name"].removeprefix("lockstep/")].append(_interval_of(event))
    total = (whole[1] - whole[0]) * _MICRO / count
    outside = _outside([*operators, *_launches_of(inside), *kernels], spans)
    return Trace(
        path,
        facts,
        count,
        total,
        {name: length(parts) * _MICRO / count for name, parts in spans.items()},
        sorted(
            (Operator(name, calls / count, time * _MICRO / count) for name, (calls, time) in names.items()),
            key=lambda operator: -operator.seconds,
        ),
        len(leaves) / count,
        _small(leaves, phases) * _MICRO / count,
        {name: length(parts) * _MICRO / count for name, parts in outside.items()},
        sum(_phase_at(phases, event["ts"]) in ("forward", "backward") for event in reads) / count,
        _collectives(inside, count, int(facts["ranks"])),
        _device_use(inside, whole, count, spans),
        _overlap(inside, computing, phases),
    )


def _phase_at(phases: Sequence[tuple[float, str]], time: float) -> str:
    index = bisect_right(phases, (time, "~")) - 1
    return phases[index][1] if index >= 0 else ""


def _own_times(operators: Iterable[Event]) -> tuple[list[Event], dict[str, tuple[int, float]]]:
    """Return the operators that call no others, and calls and own microseconds by name."""
    times: dict[str, tuple[int, float]] = {}
    leaves: list[Event] = []
    stacks: dict[Any, list[list[Any]]] = defaultdict(list)  # by thread: event, end, microseconds of its children

    def close(item: list[Any]) -> None:
        event, _, inner = item
        calls, total = times.get(event["name"], (0, 0.0))
        times[event["name"]] = (calls + 1, total + max(0.0, event["dur"] - inner))
        if not inner:
            leaves.append(event)

    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks[event["tid"]]
        while stack and stack[-1][1] <= event["ts"]:
            close(stack.pop())
        if stack:
            stack[-1][2] += event["dur"]
        stack.append([event, event["ts"] + event["dur"], 0.0])
    for stack in stacks.values():
        for item in stack:
            close(item)
    return sorted(leaves, key=lambda event: event["ts"]), times


def _small(leaves: Sequence[Event], phases: Sequence[tuple[float, str]]) -> float:
    """Return the microseconds of small operators and of small gaps between them."""
    small, end = 0.0, None
    durations: dict[str, list[float]] = defaultdict(list)
    for event in leaves:
        durations[event["name"]].append(event["dur"])
    usual = {name: statistics.median(of_name) for name, of_name in durations.items()}  # one that is interrupted is long
    for event in leaves:
        if _phase_at(phases, event["ts"]) not in _COMPUTE:
            end = None
            continue
        gap = event["ts"] - end if end is not None else 0.0
        small += gap if 0 < gap < _CLOSE_S / _MICRO else 0.0
        small += event["dur"] if usual[event["name"]] < _SMALL_S / _MICRO else 0.0
        end = event["ts"] + event["dur"]
    return small


def _outside(calls: Iterable[Event], spans: Mapping[str, Sequence[Interval]]) -> dict[str, list[Interval]]:
    busy = union(map(_interval_of, calls))
    outside = {}
    for name in _COMPUTE:
        idle = (gap for span in spans.get(name, ()) for gap in gaps(intersection([span], busy), span))
        outside[name] = [(begin, end) for begin, end in idle if end - begin >= _CLOSE_S / _MICRO]
    return outside


def _collectives(events: Iterable[Event], count: int, ranks: int) -> list[CollectiveUse]:
    uses: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    kernels: dict[str, float] = defaultdict(float)
    for event in events:
        name, arguments = event["name"], event.get("args", {})
        if event.get("cat") in _KERNELS and "Collective name" in arguments:
            kernels[arguments["Collective name"].strip("_")] += event["dur"]
        elif name.startswith("gloo:"):
            inputs = zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False)
            size = sum(_size(dims, kind) for dims, kind in inputs)
            use = uses[name.removeprefix("gloo:")]
            use[:] = use[0] + 1, use[1] + size, use[2] + event["dur"]
        elif name == "record_param_comms" and arguments.get("Collective name") not in (None, "wait", "barrier", "init"):
            elements = max(int(arguments.get("In msg nelems", 0)), int(arguments.get("Out msg nelems", 0)))
            size = elements * _BYTES.get(str(arguments.get("dtype")), 4)
            use = uses[str(arguments["Collective name"]).strip("_")]
            use[:] = use[0] + 1, use[1] + size, use[2] + event["dur"]
    for name, time in kernels.items():
        uses[name][2] = time
    result = []
    for name, (calls, size, time) in uses.items():
        factor = bus_factor(OPERATIONS.get(name, (name, 0))[0], ranks)
        seconds = time * _MICRO
        bandwidth = factor * size / seconds if seconds else 0.0
        result.append(CollectiveUse(name, calls / count, size / count, seconds / count, bandwidth))
    return sorted(result, key=lambda use: -use.seconds)


def _size(dims: Any, kind: str) -> float:
    return prod(dims) * _BYTES.get(kind, 4) if dims and all(isinstance(dim, int) for dim in dims) else 0.0


def _overlap(events: Sequence[Event], computing: Sequence[Event], phases: Sequence[tuple[float, str]]) -> float | None:
    """Return the share of the collectives' time when the GPU, or else this rank's thread, computes."""
    kernels = [event for event in events if event.get("cat") in _KERNELS and _is_communication(event)]
    collectives = union(map(_interval_of, kernels or [event for event in events if event["name"].startswith("gloo:")]))
    if not collectives:
        return None
    if kernels:
        others = union(map(_interval_of, computing))
    else:
        ends = [at for at, _ in phases[1:]] + [phases[-1][0]]
        others = [(at, end) for (at, name), end in zip(phases, ends, strict=True) if name in ("forward", "backward")]
    hidden = length(collectives) + length(others) - length(union([*collectives, *others]))
    return hidden / length(collectives)


# --- GPUs -----------------------------------------------------------------------------------------------------------


def _is_communication(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _device_use(
    events: Sequence[Event], whole: Interval, count: int, phases: Mapping[str, Sequence[Interval]]
) -> DeviceUse | None:
    """Return the use of the GPU over N updates; None if the trace has no kernel. `phases` are the host's."""
    kernels = [event for event in events if event.get("cat") in _KERNELS]
    if not kernels:
        return None
    compute = [event for event in kernels if event["cat"] == "kernel" and not _is_communication(event)]
    computing = union(map(_interval_of, compute))
    communicating = union(_interval_of(event) for event in kernels if _is_communication(event))
    used = union([*computing, *communicating, *(_interval_of(event) for event in kernels)])
    unused = gaps(used, whole)
    calls = (event for event in _launches_of(events) if "correlation" in event.get("args", {}))
    launches = {event["args"]["correlation"]: event for event in calls}
    delays = [
        max(0.0, event["ts"] - launches[correlation]["ts"] - launches[correlation]["dur"])
        for event in kernels
        if (correlation := event.get("args", {}).get("correlation")) in launches
    ]
    model = union([*phases.get("forward", ()), *phases.get("backward", ())])
    syncs = [
        event
        for event in _launches_of(events)
        if _synchronizes(event["name"]) and intersection([_interval_of(event)], model)
    ]
    scale = _MICRO / count

    def seconds(intervals: Iterable[Interval]) -> float:
        return length(intervals) * scale

    return DeviceUse(
        length(computing) / (whole[1] - whole[0]),
        seconds(unused),
        seconds(intersection(unused, union(phases.get("data", ())))),
        seconds(communicating) - seconds(intersection(communicating, computing)),
        statistics.median(delays) * _MICRO if delays else 0.0,
        len(syncs) / count,
        sum(event["dur"] for event in syncs) * scale,
    )


def _launches_of(events: Iterable[Event]) -> Iterable[Event]:
    return (event for event in events if event.get("cat") in _LAUNCHES)


def _kernel_times(events: Sequence[Event]) -> dict[str, tuple[int, float]]:
    """Return calls and microseconds of kernels by the operator that has launched them, else by their own name."""
    operators = {
        event["args"]["External id"]: event["name"]
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    launchers = {
        event["args"]["correlation"]: operators.get(event["args"].get("External id"))
        for event in _launches_of(events)
        if "correlation" in event.get("args", {})
    }
    times: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") not in _KERNELS:
            continue
        arguments = event.get("args", {})
        launcher = operators.get(arguments.get("External id")) or launchers.get(arguments.get("correlation"))
        name = str(launcher or event["name"])
        calls, total = times.get(name, (0, 0.0))
        times[name] = (calls + 1, total + event["dur"])
    return times


def _synchronizes(name: str) -> bool:
    return "Synchronize" in name or (name.startswith(("cudaMemcpy", "cuMemcpy")) and "Async" not in name)


def _interval_of(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]
