"""From the host to the rank's device, ahead of time.

    host      fetch k+1, pin, queue its copy | yield k | fetch k+2 ...
    copies          ............ k+1 .........
    compute   ... k-1 ...        |    ... k ...

On a GPU the copy of the next item runs on a stream of its own beside the computation. On the CPU nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.core.records import Batch, GlobalBatch

Item = TypeVar("Item", Batch, GlobalBatch)


def to_device(items: Iterator[Item], device: torch.device, pin: bool) -> Iterator[Item]:
    """The items with their tensors on `device`."""
    if device.type == "cpu":
        return items
    if device.type == "cuda":
        return _overlapped(items, device, pin)
    return (map_tensors(item, lambda tensor: tensor.to(device)) for item in items)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to each tensor within: in records, mappings, tuples and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, GlobalBatch):
        return replace(value, micro_batches=map_tensors(value.micro_batches, function))
    if isinstance(value, Batch):
        return replace(value, inputs=map_tensors(value.inputs, function), targets=map_tensors(value.targets, function))
    if isinstance(value, Mapping):
        return {name: map_tensors(part, function) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _overlapped(items: Iterator[Item], device: torch.device, pin: bool) -> Iterator[Item]:
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(tensor: Tensor) -> Tensor:
        host = tensor.pin_memory() if pin and not tensor.is_pinned() else tensor
        return host.to(device, non_blocking=True)

    def start(item: Item) -> tuple[Item, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            return map_tensors(item, copied), copies.record_event()

    def arrived(item: Item, event: torch.cuda.Event) -> Item:
        compute = torch.cuda.current_stream(device)
        compute.wait_event(event)

        def used_by_compute(tensor: Tensor) -> Tensor:  # its memory is not given to a later copy before that is done
            tensor.record_stream(compute)
            return tensor

        return map_tensors(item, used_by_compute)  # type: ignore[no-any-return]

    ahead: tuple[Item, torch.cuda.Event] | None = None
    for item in items:
        following = start(item)
        if ahead is not None:
            yield arrived(*ahead)
        ahead = following
    if ahead is not None:
        yield arrived(*ahead)
