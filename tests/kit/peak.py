"""The peak memory of a function, above what was allocated before it.

GPU    torch's own count of what it has allocated there
CPU    torch's profiler records each block of its allocator: +64 KB -64 KB +2 MB ...; the largest sum is the peak

The resident memory of the process is no measure: it includes freed blocks that the C library keeps, and rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.core.terminal import muted_stderr
from lockstep.distributed.shard_boxes import local_tensor


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes that `work` allocates on the device."""
    return _on_cpu(work) if device.type == "cpu" else _on_accelerator(work, device)


def held_by(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes that stay between updates: all that is allocated on a GPU; of these tensors on the CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _on_accelerator(work: Callable[[], object], device: torch.device) -> int:
    module = torch.get_device_module(device)
    module.synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    work()
    module.synchronize(device)
    return int(module.max_memory_allocated(device) - before)


def _on_cpu(work: Callable[[], object]) -> int:
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with muted_stderr(), profiler:  # torch 2.13's profiler prints there, whatever its log level
        work()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None, "a profiler that ended has results"
    blocks = [
        (event.start_ns(), cast("Any", event).nbytes()) for event in results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for _, size in sorted(blocks, key=lambda block: block[0]):
        now += size
        peak = max(peak, now)
    return peak
