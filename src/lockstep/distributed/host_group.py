"""Exchanges objects between ranks on the host, over gloo, whatever the backend of their tensors is.

A group without CPU tensors (nccl) gets a gloo group of the same ranks at its first exchange, so objects never wait for
an accelerator. Tensors in an object arrive on the CPU.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

_PLAIN = (Tensor, torch.nn.Parameter)  # other classes have a way of their own
_HOST = ("cpu", "meta")


class HostGroup(Protocol):
    """The exchange of objects between the ranks of a process group. All of them together."""

    def gather(self, value: object) -> list[object]:
        """Return every rank's value, in the order of ranks."""

    def broadcast(self, value: object) -> object:
        """Return rank 0's value."""

    def numbers(self, own: int) -> list[int]:
        """Return every rank's number: a `gather` without pickling."""


class GlooGroup:
    """The exchange of ranks that are processes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._size: int = group.size()
        self._rank: int = group.rank()
        self._gloo: Any = group if "cpu" in device_types(group) else _connected(group)

    def gather(self, value: object) -> list[object]:
        own = _bytes(value)
        sizes = self.numbers(len(own))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        return [_object(data[:size]) for data, size in zip(self._gathered(padded), sizes, strict=True)]

    def broadcast(self, value: object) -> object:
        if self._rank == 0:
            data = _bytes(value)
            self._broadcast(torch.tensor([len(data)]))
            self._broadcast(data)
            return value
        size = int(self._broadcast(torch.tensor([0])))
        return _object(self._broadcast(torch.empty(size, dtype=torch.uint8)))

    def numbers(self, own: int) -> list[int]:
        return cast("list[int]", torch.cat(self._gathered(torch.tensor([own]))).tolist())

    def _gathered(self, own: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(own) for _ in range(self._size)]
        self._gloo.allgather([everyone], [own]).wait()
        return everyone

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._gloo.broadcast([tensor], options).wait()
        return tensor


makers: dict[str, Callable[[dist.ProcessGroup], HostGroup]] = {}
"""The makers of exchanges for simulated backends, where ranks aren't processes, by the backend's name. All others are
connected over gloo."""

_groups: dict[dist.ProcessGroup, HostGroup] = {}
"""The exchange of each process group. Process-wide, as torch's registry: a group is the same for all who hold it."""
_made: Counter[str] = Counter()


def host_group(group: dist.ProcessGroup) -> HostGroup:
    """Return the exchange of a group's ranks. All of them together the first time."""
    if group not in _groups:
        _groups[group] = makers.get(dist.get_backend(group), GlooGroup)(group)
    return _groups[group]


def forget_host_groups() -> None:
    """Close all of them; they end with the process group."""
    _groups.clear()
    _made.clear()


def device_types(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the device types of the tensors that a group's backend takes."""
    return tuple(pair.partition(":")[0] for pair in dist.get_backend_config(group).split(","))


def pickled(value: object) -> bytes:
    """Return the pickled value, with its tensors on the CPU."""
    buffer = io.BytesIO()
    _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _HostPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) in _PLAIN and value.device.type not in _HOST:
            return cast("Any", value.detach().cpu()).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickled(value)), dtype=torch.uint8)


def _object(data: Tensor) -> object:
    return pickle.loads(data.numpy().tobytes())


def _connected(group: dist.ProcessGroup) -> object:
    """Connect the ranks of a group over gloo.

    Not by torch's `new_group`: beside nccl with a bound device, ranks outside the group would have to take part; with
    `use_local_synchronization` the name may differ between members.
    """
    c10d = cast("Any", dist.distributed_c10d)
    ranks = hashlib.sha1("-".join(map(str, dist.get_process_group_ranks(group))).encode()).hexdigest()
    _made[ranks] += 1
    gloo = cast("Any", dist).ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device(lazy_init=True)]
    options._timeout = c10d.default_pg_timeout  # see `timeouts`
    assert isinstance(options._timeout, timedelta)
    store = PrefixStore(f"lockstep-host/{ranks}/{_made[ranks]}", c10d._get_default_store())
    return gloo(store, group.rank(), group.size(), options)
