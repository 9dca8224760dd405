"""How much memory work needs at once, above what was there before it.

GPU    torch's own count of what it has allocated there
CPU    torch's allocator tells its profiler of each block: +64 KB -64 KB +2 MB ...; the largest sum is the peak

Not the resident memory of the process: what the C library keeps of freed blocks, and how it rounds, is no part of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.distributed.shard_boxes import local_tensor


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Bytes."""
    return _on_gpu(work, device) if device.type == "cuda" else _on_cpu(work)


def held_by(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of what stays between updates: on a GPU all that is allocated there, on the CPU what these tensors have."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _on_gpu(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _on_cpu(work: Callable[[], object]) -> int:
    seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _unheard(), seen:
        work()
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    assert results is not None, "a profiler that ended has results"
    blocks = [
        (event.start_ns(), cast("Any", event).nbytes()) for event in results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for _, size in sorted(blocks, key=lambda block: block[0]):
        now += size
        peak = max(peak, now)
    return peak


@contextmanager
def _unheard() -> Iterator[None]:
    """torch 2.13's profiler tells stderr that it starts and stops, whatever its log level, and that it doesn't know how
    large a block was that lay there before; such a one is freed when the batch before is."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
