"""The only raw collectives. An axis of one rank has none: it returns its arguments, so callers need no branch.

    tensors, on the accelerator     nccl     sum  start_sum  start_all_to_all  concatenate  ... core `Axis`
    objects, on the host            gloo     gather  broadcast                                     core `Control`
    waits that may take hours       store    barrier

A tensor is reduced on the device of the group's backend, wherever it is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from lockstep.core.errors import Failure
from lockstep.distributed.host_group import HostGroup, device_types, host_group, pickled

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis
    from lockstep.distributed.store_exchange import StoreExchange

T = TypeVar("T")


class LocalGroup:
    """An axis of one rank."""

    size = 1
    rank = 0

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def start_all_to_all(self, sent: Tensor, given: Sequence[int], taken: Sequence[int]) -> Callable[[], Tensor]:
        return lambda: sent

    def concatenate(self, part: Tensor, whole: Tensor) -> None:
        whole.copy_(part)

    def copy_first(self, tensor: Tensor) -> None:
        pass

    def swap(self, to: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
        raise AssertionError("there is no other rank")

    def gather(self, value: object) -> list[object]:
        return [value]

    def broadcast(self, value: object) -> object:
        return value

    def barrier(self) -> None:
        pass


def from_first_rank(axis: Axis, make: Callable[[], T]) -> T:
    """Return what a function returns on rank 0, on all ranks, however long it takes. A Failure is raised on all."""
    result: T | Failure | None = None
    if axis.rank == 0:
        try:
            result = make()
        except Failure as failure:
            result = failure
    axis.barrier()
    result = cast("T | Failure", axis.broadcast(result))
    if isinstance(result, Failure):
        raise result
    return result


class RankGroup:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._device_types = device_types(group)
        self.size: int = group.size()
        self.rank: int = group.rank()

    # --- tensors: over the group's backend --------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        return self.start_sum(tensor)()

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        moved = _moved(tensor, self._device_types)
        work = self._group.allreduce([moved])

        def finish() -> Tensor:
            work.wait()
            return tensor if moved is tensor else tensor.copy_(moved)

        return finish

    def start_all_to_all(self, sent: Tensor, given: Sequence[int], taken: Sequence[int]) -> Callable[[], Tensor]:
        size, dtype, moved = sent.itemsize, sent.dtype, self._moved(sent).view(torch.uint8)  # no backend lacks bytes
        received = moved.new_empty(sum(taken) * size)
        into, out_of = ([number * size for number in numbers] for numbers in (taken, given))
        work = dist.all_to_all_single(received, moved, into, out_of, group=self._group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return received.view(dtype)

        return finish

    def concatenate(self, part: Tensor, whole: Tensor) -> None:
        moved, everything = self._moved(part), self._moved(whole)
        dist.all_gather(list(everything.view(self.size, -1)), moved, group=self._group)
        if everything is not whole:
            whole.copy_(everything)

    def copy_first(self, tensor: Tensor) -> None:
        moved = self._moved(tensor).contiguous()  # gloo would read and write beyond the elements of others
        dist.broadcast(moved, group=self._group, group_src=0)
        if moved is not tensor:
            tensor.copy_(moved)

    def swap(self, to: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
        ops, buffer = [], self._moved(received) if received is not None else None
        if sent is not None:
            ops.append(dist.P2POp(dist.isend, self._moved(sent), group=self._group, group_peer=to))
        if buffer is not None:
            ops.append(dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=source))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if received is not None and buffer is not None and buffer is not received:
            received.copy_(buffer)

    # --- objects: over gloo -----------------------------------------------------------------------------------------

    def host(self) -> HostGroup:
        """Return these ranks' exchange on the host. All of them together the first time."""
        return host_group(self._group)

    def gather(self, value: object) -> list[object]:
        return self.host().gather(value)

    def gather_if_all(self, value: object) -> list[object]:
        """Gather at a point that some ranks may not reach. Raises RunFailed if some don't."""
        if _waits is None:  # outside of a run
            return self.gather(value)
        values = _waits.gather_if_all(dist.get_process_group_ranks(self._group), pickled(value))
        return [pickle.loads(cast("bytes", data)) for data in values]

    def broadcast(self, value: object) -> object:
        return self.host().broadcast(value)

    def barrier(self) -> None:
        if _waits is not None:
            _waits.barrier(dist.get_process_group_ranks(self._group))
        else:  # outside of a run
            self.gather(None)

    def close(self) -> None:
        """Release the group, which a user's variable may hold beyond its end."""
        del self._group  # its threads now and then abort a shutdown: `terminate called without an active exception`

    def _moved(self, tensor: Tensor) -> Tensor:
        return _moved(tensor, self._device_types)


def _moved(tensor: Tensor, types: Sequence[str]) -> Tensor:
    """Return the tensor, or a copy on the device of a backend that takes these device types."""
    return tensor if tensor.device.type in types else tensor.to(torch.device(types[0]))  # the current one of its type


_waits: StoreExchange | None = None
"""The exchange with the store that all groups wait over. Process-wide, as torch and DeviceMesh make groups, too."""


@contextmanager
def waiting_over(exchange: StoreExchange | None) -> Iterator[None]:
    """Have `barrier` use the store of a run's ranks while the block runs."""
    global _waits
    outer, _waits = _waits, exchange
    try:
        yield
    finally:
        _waits = outer


def group_or_all(group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks of a process group; None: all ranks."""
    every = dist.group.WORLD if group is None else group
    assert every is not None, "a process group was made"
    return RankGroup(every)


def own_group(groups: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
    """Return the group that this rank is in, if any; all ranks together. No rank is in two of `groups`.

    nccl makes all of them in one split of the communicator, where `new_group` would split once for each.
    """
    every = [list(ranks) for ranks in groups]
    if _splits():
        return dist.split_group(split_ranks=every)
    own = None
    for ranks in every:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own


def _splits() -> bool:
    """Return whether the communicator of all ranks exists, so that torch splits it."""
    default = dist.distributed_c10d._get_default_group()
    device = default.bound_device_id
    return device is not None and default._get_backend(device).supports_splitting


def maximum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replace the tensor by its elementwise maximum over the group, in place; return it."""
    moved = _moved(tensor, device_types(group))
    dist.all_reduce(moved, dist.ReduceOp.MAX, group)
    return tensor if moved is tensor else tensor.copy_(moved)


def send(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """Send a tensor to a rank of the group; return when it was sent."""
    dist.send(tensor.contiguous(), group=group, group_dst=rank)


def receive(buffer: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    """Receive a tensor from a rank of the group into the buffer; return it."""
    dist.recv(buffer, group=group, group_src=rank)
    return buffer


class Ring:
    """The ranks of a group in a circle: 0 --> 1 --> 2 --> 0.

    Each sends tensors to the next one and receives the tensors of the one before.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._group = group
        self.size = len(ranks)
        self.rank = group.rank()
        self._next = ranks[(self.rank + 1) % self.size]
        self._before = ranks[(self.rank - 1) % self.size]

    def pass_on(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start sending; return a function that waits and returns the received tensors, of the same shapes and dtypes.

        The tensors must not be changed until then.
        """
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, self._next, self._group) for tensor in sent]
            + [dist.P2POp(dist.irecv, tensor, self._before, self._group) for tensor in received]
        )

        def finish() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # kept alive until they were sent
            return received

        return finish
