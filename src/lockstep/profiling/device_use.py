"""Measures what a GPU does in a trace of Kineto: computes, communicates, copies, waits for the host or for data.

    host    cudaLaunchKernel (correlation 7) ... cudaStreamSynchronize
    GPU              delay  | kernel (correlation 7) | idle |  ncclDevKernel_AllReduce (exposed where nothing computes)

A kernel has no operator: its launch has, as the External id of the operator around it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.intervals import Interval, gaps, intersection, length, union

Event = Mapping[str, Any]
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a GPU; seconds are those of an update.

    Attributes:
        busy: Share of the time in which it computes.
        idle: Seconds in which it does nothing, not even communicate or copy.
        stalled: Of these, seconds in which the host waits for data.
        exposed: Seconds in which it communicates and computes nothing.
        delay: Seconds from a kernel's launch to its start, the median: short if the GPU waits for the host.
        syncs: Calls in forward and backward for which the host waits until the GPU has done its work.
        sync_seconds: Seconds that the host waits in them.
        pageable: Seconds of copies from the host's memory that isn't page-locked.
    """

    busy: float
    idle: float
    stalled: float
    exposed: float
    delay: float
    syncs: float
    sync_seconds: float
    pageable: float


def is_communication(event: Event) -> bool:
    """Return whether a kernel is one of NCCL's, or of RCCL's, which has the same names."""
    return "nccl" in event["name"].lower()


def device_use(
    events: Sequence[Event], whole: Interval, count: int, phases: Mapping[str, Sequence[Interval]]
) -> DeviceUse | None:
    """Return the use of the GPU over N updates; None if the trace has no kernel.

    Args:
        phases: When the host was in each phase.
    """
    kernels = [event for event in events if event.get("cat") in KERNELS]
    if not kernels:
        return None
    compute = [event for event in kernels if event["cat"] == "kernel" and not is_communication(event)]
    computing = union(map(interval_of, compute))
    communicating = union(interval_of(event) for event in kernels if is_communication(event))
    used = union([*computing, *communicating, *(interval_of(event) for event in kernels)])
    unused = gaps(used, whole)
    calls = (event for event in launches_of(events) if "correlation" in event.get("args", {}))
    launches = {event["args"]["correlation"]: event for event in calls}
    delays = [
        max(0.0, event["ts"] - launches[correlation]["ts"] - launches[correlation]["dur"])
        for event in kernels
        if (correlation := event.get("args", {}).get("correlation")) in launches
    ]
    model = union([*phases.get("forward", ()), *phases.get("backward", ())])
    syncs = [
        event
        for event in launches_of(events)
        if _synchronizes(event["name"]) and intersection([interval_of(event)], model)
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
        sum(event["dur"] for event in kernels if event["cat"] == "gpu_memcpy" and "Pageable" in event["name"]) * scale,
    )


def launches_of(events: Iterable[Event]) -> Iterable[Event]:
    """Return the calls of CUDA's runtime and driver."""
    return (event for event in events if event.get("cat") in _LAUNCHES)


def kernel_times(events: Sequence[Event]) -> dict[str, tuple[int, float]]:
    """Return calls and microseconds of kernels by the operator that has launched them, else by their own name."""
    operators = {
        event["args"]["External id"]: event["name"]
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    launchers = {
        event["args"]["correlation"]: operators.get(event["args"].get("External id"))
        for event in launches_of(events)
        if "correlation" in event.get("args", {})
    }
    times: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") not in KERNELS:
            continue
        arguments = event.get("args", {})
        launcher = operators.get(arguments.get("External id")) or launchers.get(arguments.get("correlation"))
        name = str(launcher or event["name"])
        calls, total = times.get(name, (0, 0.0))
        times[name] = (calls + 1, total + event["dur"])
    return times


def _synchronizes(name: str) -> bool:
    return "Synchronize" in name or (name.startswith(("cudaMemcpy", "cuMemcpy")) and "Async" not in name)


def interval_of(event: Event) -> Interval:
    """Return begin and end of an event, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]
