"""Explains traces: what limits the run, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lockstep.core import formatting
from lockstep.core.formatting import short_time
from lockstep.monitor.rank_meters import RankTimes, stragglers_of
from lockstep.report.limits import Limit, crowded_limits, phase_limits, straggler_limit

if TYPE_CHECKING:
    from lockstep.profiling.traces import DeviceUse, Trace

_MANY_READS = 4
_SMALL_SHARE = 0.4
_OUTSIDE_SHARE = 0.15
_MOSTLY = 0.95
_MOST_OPERATORS = 10
_NOTABLE = 0.1
_MANY_SYNCS = 4
_SHORT_DELAY_S = 50e-6  # a kernel that starts so soon after its launch had no others before it
_IDLE = 0.2
_RAISE_MICRO_SIZE = (
    "raise batch.micro_size (auto: the largest that fits in memory), so that each has more to do, or set "
    "model.compile: true if it isn't set"
)
_RAISE_SIZES = "raise batch.global_size or batch.micro_size: an update exchanges as much for more samples"


def findings_of(traces: Sequence[Trace]) -> list[Limit]:
    """Return what limits the updates of the newest traces, the largest gain first."""
    first = max(trace.facts["first"] for trace in traces)
    newest = [trace for trace in traces if trace.facts["first"] == first]
    slowest = max(newest, key=lambda trace: trace.computing)
    findings = [*_stragglers(newest), *phase_limits(_waits(slowest), slowest.seconds), *_host(slowest)]
    if slowest.device is not None:
        findings += _device(slowest, slowest.device)
    return sorted(findings, key=lambda finding: -finding.share)


def _stragglers(traces: Sequence[Trace]) -> Iterator[Limit]:
    times = [RankTimes(trace.rank, str(trace.facts["host"]), trace.seconds, trace.split) for trace in traces]
    for slow in stragglers_of(times)[:1]:
        trace = next(trace for trace in traces if trace.rank == slow.rank)
        yield straggler_limit(slow, (1 - 1 / slow.ratio) * trace.computing / trace.seconds)


def _waits(trace: Trace) -> dict[str, float]:
    """Return the seconds that an update waits; for other ranks only on a CPU: elsewhere it waits for the GPU, too."""
    if trace.device is not None:
        return {"data": trace.device.stalled, "save": trace.split.get("save", 0.0)}
    return {phase: trace.split.get(phase, 0.0) for phase in ("data", "save", "communication")}


def _host(trace: Trace) -> Iterator[Limit]:
    yield from crowded_limits("an update", trace.queued / trace.seconds)
    if trace.reads > _MANY_READS:
        reading = (each.seconds for each in trace.operators if each.name in ("aten::item", "aten::_local_scalar_dense"))
        yield Limit(
            "host sync",
            min(1.0, sum(reading) / trace.seconds),
            f"forward and backward read {trace.reads:.0f} numbers of tensors on the host in an update (.item(), "
            "float(tensor), if tensor): on a GPU, each waits until all work before it is done",
            "keep the numbers on the device (torch.where, Tensor comparisons); read them after the update, if at all",
        )
    if trace.small > _SMALL_SHARE * (trace.seconds - trace.queued):
        yield Limit(
            "small operators",
            trace.small / trace.seconds,
            f"the host is the limit: an update has {trace.calls:,.0f} operators, and "
            f"{trace.small / trace.seconds:.0%} of its time goes into those under 20 us and their calls",
            _RAISE_MICRO_SIZE,
        )
    outside = sum(trace.outside.values()) - trace.queued  # a thread without a core looks like code outside of torch
    is_busy = trace.device is not None and not _waits_for_launches(trace.device)
    if outside > _OUTSIDE_SHARE * trace.seconds and not is_busy:
        phase = max(trace.outside, key=lambda name: trace.outside[name])
        mostly = "" if trace.outside[phase] > _MOSTLY * sum(trace.outside.values()) else " most of all"
        yield Limit(
            "host code",
            min(1.0, outside / trace.seconds),
            f"an update spends {short_time(outside)} outside of torch's operators, {outside / trace.seconds:.0%} of "
            f"its time,{mostly} in the {phase}",
            f"find the code with profile.stacks: true; move it out of the {phase}",
        )


def _device(trace: Trace, device: DeviceUse) -> Iterator[Limit]:
    exposed, idle = device.exposed / trace.seconds, max(0.0, device.idle - device.stalled)
    if exposed > _NOTABLE:
        yield Limit(
            "communication",
            exposed,
            f"the GPU computes nothing for {short_time(device.exposed)} of an update while it communicates, "
            f"{exposed:.0%} of its time",
            f"{_RAISE_SIZES}; lockstep doctor --ranks N measures the links",
        )
    if idle > _IDLE * trace.seconds:
        waits = _waits_for_launches(device)
        why = "it waits for the host's launches" if waits else "the gaps in the trace follow something else"
        yield Limit(
            "host-bound" if waits else "idle device",
            idle / trace.seconds,
            f"the GPU does nothing for {short_time(idle)} of an update, {idle / trace.seconds:.0%} of its time, and a "
            f"kernel starts {short_time(device.delay)} after its launch: {why}",
            _RAISE_MICRO_SIZE if waits else "see in the trace what the gaps follow: sync calls, saves, other streams",
        )
    if device.syncs > _MANY_SYNCS:
        yield Limit(
            "sync calls",
            min(idle, device.sync_seconds) / trace.seconds,
            f"forward and backward make the host wait for the GPU {device.syncs:.0f} times in an update, for "
            f"{short_time(device.sync_seconds)} in all",
            "find .item(), .cpu(), nonzero and copies without non_blocking in the model (profile.stacks: true)",
        )


def _waits_for_launches(device: DeviceUse) -> bool:
    """Return whether kernels start as soon as they are launched: a GPU that is idle then waits for the host."""
    return device.delay < _SHORT_DELAY_S


# --- text -----------------------------------------------------------------------------------------------------------


def summary_lines(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield each rank's time and collectives, operators of the slowest rank, then the findings."""
    for trace in traces:
        facts = trace.facts
        of = f" {facts['first']:,}" if facts["first"] == facts["last"] else f"s {facts['first']:,} to {facts['last']:,}"
        yield f"rank {trace.rank}, update{of}: {short_time(trace.seconds)} each"
        parts = sorted(trace.split.items(), key=lambda item: -item[1])
        yield "  time         " + ", ".join(f"{name} {seconds / trace.seconds:.0%}" for name, seconds in parts)
        if (device := trace.device) is not None:
            shares = {"communicates alone": device.exposed, "waits for data": device.stalled}
            shares["is otherwise idle"] = max(0.0, device.idle - device.stalled)
            further = ", ".join(f"{name} {part / trace.seconds:.0%}" for name, part in shares.items())
            delay = short_time(device.delay)
            yield f"  GPU          computes {device.busy:.0%}, {further}; a kernel starts {delay} after its launch"
        for use in trace.collectives:
            bandwidth = f", bus {formatting.size(use.bandwidth)}/s" if use.bandwidth else ""
            exchanged = f"{formatting.size(use.size)} in {short_time(use.seconds)}"
            yield f"  {use.name:<12} {use.calls:.0f} calls, {exchanged}{bandwidth}"
        if trace.overlap is not None:
            yield f"  overlap      {trace.overlap:.0%} of the collectives' time is hidden behind computation"
        yield f"  trace        {trace.path}"
    if not traces:
        return
    slowest = max(traces, key=lambda trace: trace.computing)
    yield f"most expensive operators of rank {slowest.rank}, per update, without those that they call"
    for operator in slowest.operators[:_MOST_OPERATORS]:
        share = operator.seconds / slowest.seconds
        yield f"  {short_time(operator.seconds):>9} {share:>5.1%}  {operator.calls:>7,.0f} x {operator.name}"
    findings = findings_of(traces)
    yield "what limits it" if findings else "nothing stands out: the model's own operators take the time"
    for finding in findings:
        yield f"  {finding.fact}"
        yield f"    try: {finding.remedy} (saves at most {finding.share:.0%} of an update)"
