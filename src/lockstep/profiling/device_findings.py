"""Explains the use of a GPU in a trace: it waits for the host, for other ranks, for copies, or the host for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.core.formatting import short_time
from lockstep.profiling.finding import RAISE_MICRO_SIZE, RAISE_SIZES, ProfileFinding

if TYPE_CHECKING:
    from lockstep.profiling.device_use import DeviceUse
    from lockstep.profiling.traces import Trace

_NOTABLE = 0.1
_MANY_SYNCS = 4
_SHORT_DELAY_S = 50e-6  # a kernel that starts so soon after its launch had no others before it
_IDLE = 0.2


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
