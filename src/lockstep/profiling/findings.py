"""Explains traces: what limits the run, what to try, and what that is expected to gain.

A gain is the share of an update that is saved if the time that the finding names disappears: its upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core import formatting
from lockstep.core.formatting import short_time
from lockstep.monitor.rank_meters import RankTimes, stragglers_of
from lockstep.report.limits import COMMUNICATION_SHARE, CROWDED_SHARE, DATA_SHARE, SAVE_SHARE

if TYPE_CHECKING:
    from lockstep.profiling.device_use import DeviceUse
    from lockstep.profiling.traces import Trace

_MANY_READS = 4
_SMALL_SHARE = 0.4
_OUTSIDE_SHARE = 0.15
_MOSTLY = 0.95
_MOST_OPERATORS = 10
_NOTABLE = 0.1
_MANY_SYNCS = 4
_SHORT_DELAY_S = 50e-6  # a kernel that starts so soon after its launch had no others before it
_IDLE = 0.2
RAISE_MICRO_SIZE = "raise batch.micro_size (auto: the largest that fits in memory)"
RAISE_SIZES = (
    "raise batch.global_size or batch.micro_size (auto: the largest that fits in memory): an update exchanges as much "
    "for more samples"
)


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """A cause that limits a run.

    Attributes:
        name: Such as `data`, for programs.
        text: A sentence.
        remedy: What to try.
        gain: Share of an update that it would save at most.
    """

    name: str
    text: str
    remedy: str
    gain: float


def findings_of(traces: Sequence[Trace]) -> list[ProfileFinding]:
    """Return what limits the updates that the traces are of, the largest gain first."""
    first = max(trace.facts["first"] for trace in traces)
    newest = [trace for trace in traces if trace.facts["first"] == first]
    slowest = max(newest, key=lambda trace: trace.computing)
    findings = [
        *_stragglers(newest),
        *_phases(slowest),
        *_host(slowest),
        *_communication(slowest, len(newest)),
        *device_findings(slowest),
    ]
    return sorted(findings, key=lambda finding: -finding.gain)


def _stragglers(traces: Sequence[Trace]) -> Iterator[ProfileFinding]:
    times = [RankTimes(trace.rank, str(trace.facts["host"]), trace.seconds, trace.split) for trace in traces]
    for slow in stragglers_of(times)[:1]:
        trace = next(trace for trace in traces if trace.rank == slow.rank)
        yield ProfileFinding(
            "slow rank",
            f"rank {slow.rank} on {slow.host} computes {slow.ratio:.1f} times as long as the median rank, "
            f"in its {slow.phase}; the others wait for it",
            "lockstep doctor on its host shows clocks, throttling, other processes; if it has more data, even it out",
            (1 - 1 / slow.ratio) * trace.computing / trace.seconds,
        )


def _phases(trace: Trace) -> Iterator[ProfileFinding]:
    waits = trace.split.get("data", 0.0) if trace.device is None else trace.device.stalled
    data, save, who = waits / trace.seconds, trace.share("save"), "an update" if trace.device is None else "the GPU"
    if data > DATA_SHARE:
        yield ProfileFinding(
            "data",
            f"{who} waits {short_time(waits)} for data in an update, {data:.0%} of its time",
            "raise data.loader.workers, or prepare the samples once instead of in each epoch",
            data,
        )
    if save > SAVE_SHARE:
        yield ProfileFinding(
            "save",
            f"an update waits {short_time(trace.split['save'])} for checkpoints, {save:.0%} of its time",
            "save less often (checkpoint.every), or keep checkpoint.asynchronous: true",
            save,
        )


def _host(trace: Trace) -> Iterator[ProfileFinding]:
    if trace.queued > CROWDED_SHARE * trace.seconds:
        yield ProfileFinding(
            "crowded host",
            f"an update waits {short_time(trace.queued)} for a core that other threads and processes have, "
            f"{trace.queued / trace.seconds:.0%} of its time",
            "end the other processes (top shows them), ask the scheduler for more cores, or start fewer ranks, loader "
            "workers and threads (OMP_NUM_THREADS) on the host",
            trace.queued / trace.seconds,
        )
    if trace.reads > _MANY_READS:
        yield ProfileFinding(
            "host sync",
            f"forward and backward read {trace.reads:.0f} numbers of tensors on the host in an update (.item(), "
            "float(tensor), if tensor): on a GPU, each waits until all work before it is done",
            "keep the numbers on the device (torch.where, Tensor comparisons); read them after the update, if at all",
            min(1.0, _operator_share(trace, "aten::item", "aten::_local_scalar_dense")),
        )
    if trace.small > _SMALL_SHARE * (trace.seconds - trace.queued):
        yield ProfileFinding(
            "small operators",
            f"the host is the limit: an update has {trace.calls:,.0f} operators, and "
            f"{trace.small / trace.seconds:.0%} of its time goes into those under 20 us and their calls",
            f"{RAISE_MICRO_SIZE}, so that an operator has more to do, or set model.compile: true if it isn't set",
            trace.small / trace.seconds,
        )
    yield from _host_code(trace)


def _host_code(trace: Trace) -> Iterator[ProfileFinding]:
    if trace.device is not None and not waits_for_launches(trace.device):
        return
    outside = sum(trace.outside.values()) - trace.queued  # a thread without a core looks like code outside of torch
    if outside <= _OUTSIDE_SHARE * trace.seconds:
        return
    phase = max(trace.outside, key=lambda name: trace.outside[name])
    mostly = "" if trace.outside[phase] > _MOSTLY * sum(trace.outside.values()) else " most of all"
    yield ProfileFinding(
        "host code",
        f"an update spends {short_time(outside)} outside of torch's operators, {outside / trace.seconds:.0%} of its "
        f"time,{mostly} in the {phase}",
        f"find the code with profile.stacks: true; move it out of the {phase}",
        min(1.0, outside / trace.seconds),
    )


def _communication(trace: Trace, traced: int) -> Iterator[ProfileFinding]:
    if trace.device is not None:  # on the host, a wait for a collective is one for all work of the GPU
        return
    share = trace.share("communication")
    if share <= COMMUNICATION_SHARE:
        return
    hidden = f", and {trace.overlap:.0%} of the collectives' time is hidden" if trace.overlap is not None else ""
    alone = traced < int(trace.facts["ranks"])
    yield ProfileFinding(
        "communication",
        f"an update waits {short_time(trace.split['communication'])} for other ranks, {share:.0%} of its time{hidden}",
        "trace all ranks (--ranks all), to see whether one of them is slow" if alone else RAISE_SIZES,
        share,
    )


def _operator_share(trace: Trace, *names: str) -> float:
    return sum(operator.seconds for operator in trace.operators if operator.name in names) / trace.seconds


def summary_lines(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield the summary of a run's traces: each rank's time, operators and collectives, then the findings."""
    for trace in traces:
        facts = trace.facts
        of = f" {facts['first']:,}" if facts["first"] == facts["last"] else f"s {facts['first']:,} to {facts['last']:,}"
        yield f"rank {trace.rank}, update{of}: {short_time(trace.seconds)} each"
        parts = sorted(trace.split.items(), key=lambda item: -item[1])
        yield "  time         " + ", ".join(f"{name} {seconds / trace.seconds:.0%}" for name, seconds in parts)
        if trace.device is not None:
            yield f"  GPU          {device_line(trace.device, trace.seconds)}"
        for use in trace.collectives:
            bandwidth = f", bus {formatting.size(use.bandwidth)}/s" if use.bandwidth else ""
            exchanged = f"{formatting.size(use.size)} in {short_time(use.seconds)}"
            yield f"  {use.name:<12} {use.calls:.0f} calls, {exchanged}{bandwidth}"
        if trace.overlap is not None:
            yield f"  overlap      {trace.overlap:.0%} of the collectives' time is hidden behind computation"
        yield f"  trace        {trace.path}"
    if traces:
        yield from _operators(max(traces, key=lambda trace: trace.computing))
        findings = findings_of(traces)
        yield "what limits it" if findings else "nothing stands out: the time is that of the model's own operators"
        for finding in findings:
            yield f"  {finding.text}"
            yield f"    try: {finding.remedy} (saves at most {finding.gain:.0%} of an update)"


def _operators(trace: Trace) -> Iterator[str]:
    yield f"most expensive operators of rank {trace.rank}, per update, without those that they call"
    for operator in trace.operators[:_MOST_OPERATORS]:
        share = operator.seconds / trace.seconds
        yield f"  {short_time(operator.seconds):>9} {share:>5.1%}  {operator.calls:>7,.0f} x {operator.name}"


def device_findings(trace: Trace) -> Iterator[ProfileFinding]:
    """Yield what limits a GPU's use; nothing of a trace without one."""
    device = trace.device
    if device is None:
        return
    share = 1 / trace.seconds
    if device.exposed * share > _NOTABLE:
        hidden = f"; {trace.overlap:.0%} of it is hidden" if trace.overlap is not None else ""
        yield ProfileFinding(
            "communication",
            f"the GPU computes nothing for {short_time(device.exposed)} of an update while it communicates, "
            f"{device.exposed * share:.0%} of its time{hidden}",
            f"{RAISE_SIZES}; lockstep doctor measures the links",
            device.exposed * share,
        )
    idle = max(0.0, device.idle - device.stalled)
    if idle * share > _IDLE:
        yield _idle(device, idle, share)
    if device.syncs > _MANY_SYNCS:
        yield ProfileFinding(
            "sync calls",
            f"forward and backward make the host wait for the GPU {device.syncs:.0f} times in an update, for "
            f"{short_time(device.sync_seconds)} in all",
            "find .item(), .cpu(), nonzero and copies without non_blocking in the model (profile.stacks: true)",
            min(idle, device.sync_seconds) * share,
        )
    if device.pageable * share > _NOTABLE:
        yield ProfileFinding(
            "pageable copies",
            f"copies from memory that isn't page-locked take {short_time(device.pageable)} of an update",
            "leave data.loader.pin_memory: auto, and copy with non_blocking=True in your own code",
            device.pageable * share,
        )


def _idle(device: DeviceUse, idle: float, share: float) -> ProfileFinding:
    if waits_for_launches(device):
        return ProfileFinding(
            "host-bound",
            f"the GPU does nothing for {short_time(idle)} of an update, {idle * share:.0%} of its time, and a kernel "
            f"starts {short_time(device.delay)} after its launch: it waits for the host's launches",
            f"{RAISE_MICRO_SIZE}, so that a kernel has more to do, or set model.compile: true if it isn't set",
            idle * share,
        )
    return ProfileFinding(
        "idle device",
        f"the GPU does nothing for {short_time(idle)} of an update, {idle * share:.0%} of its time, although kernels "
        f"wait {short_time(device.delay)} for their turn",
        "see in the trace what the gaps follow: sync calls, saves, waits between streams",
        idle * share,
    )


def waits_for_launches(device: DeviceUse) -> bool:
    """Return whether kernels start as soon as they are launched, so that a GPU that is idle waits for the host."""
    return device.delay < _SHORT_DELAY_S


def device_line(device: DeviceUse, seconds: float) -> str:
    """Return the line of a summary."""
    parts = {"communicates alone": device.exposed, "waits for data": device.stalled}
    parts["is otherwise idle"] = max(0.0, device.idle - device.stalled)
    further = ", ".join(f"{name} {part / seconds:.0%}" for name, part in parts.items())
    return f"computes {device.busy:.0%}, {further}; a kernel starts {short_time(device.delay)} after its launch"
