"""Process groups without other ranks: collectives with results as if every rank had what this one has.

    all_reduce(x)        sum: x times the number of ranks; minimum, maximum, average: x
    reduce_scatter(x)    this rank's part of x, times the ranks
    all_gather(x), objects    this rank's for every rank
    receive              ones

A group of a device takes only that device's tensors, as NCCL does. Each collective is counted with its bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import ReduceOp
from torch.futures import Future

from lockstep.distributed import host_group
from lockstep.simulation import device
from lockstep.simulation.repeats import tensors_in

BACKENDS = {device.NAME: "simulated", "cpu": "simulated_cpu"}
"""Names of the backends, by the type of their device."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that this rank has issued; its bytes are those that it puts in."""

    name: str
    ranks: int
    bytes: int


class WrongDevice(RuntimeError):
    """A collective got a tensor that is not on the device of its group."""


class SimulatedGroup(dist.ProcessGroup):
    """The ranks of a group; only this one exists; `issued` has the collectives of all groups, in order."""

    def __init__(self, rank: int, size: int, device_type: str, issued: list[Collective]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._size = size
        self.device_type = device_type
        self.issued = issued

    def size(self) -> int:
        return self._size

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKENDS[self.device_type]

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._reduce("all_reduce", tensors, options)

    def reduce(self, tensors: Any, options: Any = None) -> Any:
        return self._reduce("reduce", tensors, options)

    def _reduce(self, name: str, tensors: Any, options: Any) -> Any:
        self._issue(name, tensors, options=options)
        for tensor in tensors:
            self._sum(tensor, options)
        return _done(tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        self._issue("broadcast", tensors, options=options)
        return _done(tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._issue("all_gather", inputs, outputs, options)
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        self._issue("all_gather", [own], [output], options)
        output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return _done(output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._issue("reduce_scatter", inputs, outputs, options)
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self.rank()])
            self._sum(output, options)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        self._issue("reduce_scatter", [whole], [output], options)
        if self.device_type == "cpu":
            whole = whole.clone()  # gloo sums a copy of everything
        output.view(-1).copy_(whole.reshape(self._size, -1)[self.rank()])
        self._sum(output, options)
        return _done(output)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, options)
        return _done(outputs)

    def all_to_all_single(self, output: Tensor, own: Tensor, *splits: Any) -> Any:
        self._issue("all_to_all", [own], [output])
        if output.numel() == own.numel():
            output.view(-1).copy_(own.reshape(-1))
        else:
            output.zero_()
        return _done(output)

    def alltoall(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._issue("all_to_all", inputs, outputs)
        for output, own in zip(outputs, inputs, strict=True):
            output.copy_(own) if output.shape == own.shape else output.zero_()
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._issue("gather", inputs, outputs)
        for parts, own in zip(outputs, inputs, strict=False):
            for part in parts:
                part.copy_(own)
        return _done(inputs)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._issue("scatter", inputs, outputs)
        for output, parts in zip(outputs, inputs, strict=False):
            output.copy_(parts[self.rank()])
        return _done(outputs)

    def send(self, tensors: Any, *where: Any) -> Any:
        self._issue("send", tensors)
        return _done(tensors)

    def recv(self, tensors: Any, *where: Any) -> Any:
        self._issue("receive", tensors)
        for tensor in tensors:
            tensor.fill_(1)
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self.issued.append(Collective("barrier", self._size, 0))
        return _done([])

    allreduce_coalesced = allreduce
    recv_anysource = recv
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _issue(self, name: str, inputs: Any, outputs: Any = (), options: Any = None) -> None:
        tensors = [*tensors_in(inputs), *tensors_in(outputs)]
        wrong = next((tensor for tensor in tensors if tensor.device.type != self.device_type), None)
        if wrong is not None:
            raise WrongDevice(
                f"{name} of a group for {self.device_type} tensors got one on {wrong.device}: "
                f"{wrong.dtype} {list(wrong.shape)}"
            )
        size = sum(tensor.nbytes for tensor in tensors_in(inputs))
        self.issued.append(Collective(name, self._size, size))
        if listener is not None:
            whole = size * self._size if name == "all_gather" else size
            listener.issue(self, name, whole, options)

    def _sum(self, tensor: Tensor, options: Any) -> None:
        if options is None or options.reduceOp == ReduceOp.SUM:
            tensor.mul_(self._size)


class SimulatedHostGroup:
    """The exchange of objects with the other ranks of a group, without a wait for the accelerator."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = group.size()

    def gather(self, value: object) -> list[object]:
        return [value] * self._ranks

    def broadcast(self, value: object) -> object:
        return value

    def numbers(self, own: int) -> list[int]:
        return [own] * self._ranks


def _done(result: Any) -> Any:
    if listener is not None:
        listener.issued()
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


_issued: list[Collective] = []
listener: Any = None
"""A trace that records collectives."""


@contextmanager
def simulated_groups(rank: int, ranks: int, device_type: str = device.NAME) -> Iterator[list[Collective]]:
    """Make the process group of one rank of many within the block; yield the list of the collectives that it issues."""
    _register()
    backend = BACKENDS[device_type]
    _issued.clear()
    excepthook = sys.excepthook
    dist.init_process_group(backend, store=HashStore(), rank=rank, world_size=ranks)
    sys.excepthook = excepthook  # torch's writes the rank before each line of a traceback, for good
    try:
        with (
            patch.object(dist, "all_gather_object", _gather_objects),
            patch.object(dist, "broadcast_object_list", lambda *_, **__: device.note_wait("broadcast_object_list")),
            patch.dict(host_group.makers, {backend: SimulatedHostGroup}),
        ):
            yield _issued
    finally:
        host_group.forget_host_groups()
        dist.destroy_process_group()
        _forget_meshes()


def _gather_objects(objects: list[Any], own: object, group: dist.ProcessGroup | None = None) -> None:
    device.note_wait("all_gather_object")
    objects[:] = [own] * dist.get_world_size(group)


def _forget_meshes() -> None:
    """Clear torch's caches of DTensor operations: their meshes name groups that no longer exist."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


@cache
def _register() -> None:
    for device_type, backend in BACKENDS.items():
        dist.Backend.register_backend(backend, partial(_make, device_type), devices=[device_type])


def _make(device_type: str, store: object, rank: int, ranks: int, timeout: object) -> SimulatedGroup:
    return SimulatedGroup(rank, ranks, device_type, _issued)
