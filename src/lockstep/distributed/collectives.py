"""The only raw collectives. An axis of one has none: it returns what it was given, and callers never ask.

Alone        sum(x) = x        gather(v) = [v]           broadcast(v) = v     exchange(x) = x_0
Together     sum(x) = sum_r x  gather(v) = [v_0, v_1..]  broadcast(v) = v_0   exchange(x) = what each has for this rank

Where a rank's failure has broken the groups, objects and small tensors go over the store: see `over_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.distributed.store_exchange import StoreExchange


class LocalGroup:
    """An axis of one rank."""

    size = 1
    rank = 0

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def exchange(self, rows: Tensor, numbers: Sequence[int]) -> Tensor:
        return rows[0]

    def concatenate(self, part: Tensor, whole: Tensor) -> None:
        whole.copy_(part)

    def copy_first(self, tensor: Tensor) -> None:
        pass

    def gather(self, value: object) -> list[object]:
        return [value]

    def broadcast(self, value: object) -> object:
        return value

    def barrier(self) -> None:
        pass


class RankGroup:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size: int = group.size()
        self.rank: int = group.rank()

    def sum(self, tensor: Tensor) -> Tensor:
        return self.start_sum(tensor)()

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        work = dist.all_reduce(tensor, group=self._group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tensor

        return finish

    def exchange(self, rows: Tensor, numbers: Sequence[int]) -> Tensor:
        width = rows.shape[2]
        received = rows.new_empty(sum(numbers), width)
        given, taken = [rows.shape[1] * width] * self.size, [number * width for number in numbers]
        dist.all_to_all_single(received.view(-1), rows.reshape(-1), taken, given, group=self._group)
        return received

    def concatenate(self, part: Tensor, whole: Tensor) -> None:
        dist.all_gather(list(whole.view(self.size, -1)), part, group=self._group)

    def copy_first(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self._group, group_src=0)

    def gather(self, value: object) -> list[object]:
        if _exchanges:
            return _gather_over_store(self._group, value)
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: object) -> object:
        if _exchanges:
            return _gather_over_store(self._group, value)[0]
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def barrier(self) -> None:
        if _exchanges:
            _gather_over_store(self._group, None)
            return
        dist.barrier(group=self._group)

    def close(self) -> None:
        """Lets go of the group: held beyond its end, by a user's variable, its threads would meet a Python that is
        being taken apart, and now and then abort it (`terminate called without an active exception`)."""
        del self._group


def group_or_all(group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks of a process group; None: all ranks."""
    every = dist.group.WORLD if group is None else group
    assert every is not None, "a process group was made"
    return RankGroup(every)


def gloo_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks: a small exchange must not wait for a GPU. All of them together."""
    if dist.get_backend(group) == "gloo":
        return group
    ranks = dist.get_process_group_ranks(group) if group is not None else None
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return cast("dist.ProcessGroup", made)


def send(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """Send a tensor to a rank of the group; it returns when the tensor was sent."""
    dist.send(tensor.contiguous(), group=group, group_dst=rank)


def receive(buffer: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    """Receive a tensor from a rank of the group into the buffer; return it."""
    dist.recv(buffer, group=group, group_src=rank)
    return buffer


def copy_first(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Copy the first rank's tensor to all ranks of a group, in place; None: of all ranks."""
    if _exchanges:
        tensor.copy_(cast("Tensor", _gather_over_store(group, tensor.cpu())[0]))
        return
    dist.broadcast(tensor, group=group, group_src=0)


_exchanges: list[StoreExchange] = []


@contextmanager
def over_store(exchange: StoreExchange) -> Iterator[None]:
    """Let `gather`, `broadcast`, `barrier` and `copy_first` of all groups use the store while the block runs; other
    collectives can't be used."""
    _exchanges.append(exchange)
    try:
        yield
    finally:
        _exchanges.pop()


def _gather_over_store(group: dist.ProcessGroup | None, value: object) -> list[object]:
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    return _exchanges[-1].gather(ranks, value)
