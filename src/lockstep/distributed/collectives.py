"""The only raw collectives. An axis of one rank has none: it returns its arguments, so callers need no branch.

LocalGroup   sum(x) = x        gather(v) = [v]           broadcast(v) = v     exchange(x) = x_0
RankGroup    sum(x) = sum_r x  gather(v) = [v_0, v_1..]  broadcast(v) = v_0   exchange(x) = each rank's for this rank

Where a rank's failure has broken the groups, objects and small tensors go over the store: see `over_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
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
        if _exchange is None:
            dist.broadcast(tensor, group=self._group, group_src=0)
        else:
            tensor.copy_(cast("Tensor", self._gather_over(_exchange, tensor.cpu())[0]))

    def gather(self, value: object) -> list[object]:
        if _exchange is not None:
            return self._gather_over(_exchange, value)
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: object) -> object:
        if _exchange is not None:
            return self._gather_over(_exchange, value)[0]
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def barrier(self) -> None:
        if _exchange is not None:
            self._gather_over(_exchange, None)
        else:
            dist.barrier(group=self._group)

    def close(self) -> None:
        """Release the group, which a user's variable may hold beyond its end."""
        del self._group  # its threads now and then abort a shutdown: `terminate called without an active exception`

    def _gather_over(self, exchange: StoreExchange, value: object) -> list[object]:
        return exchange.gather(dist.get_process_group_ranks(self._group), value)


_exchange: StoreExchange | None = None
"""Replaces the collectives of all groups while it is set. Process-wide, since a failed rank breaks every group of the
process at once, also those that torch or a `DeviceMesh` made and that no session knows."""


@contextmanager
def over_store(exchange: StoreExchange) -> Iterator[None]:
    """Have `gather`, `broadcast`, `barrier` and `copy_first` use the store; no other collective works in the block."""
    global _exchange
    _exchange = exchange
    try:
        yield
    finally:
        _exchange = None


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


def maximum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replace the tensor by its elementwise maximum over the ranks of the group, in place; return it."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor


def send(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """Send a tensor to a rank of the group; return when it was sent."""
    dist.send(tensor.contiguous(), group=group, group_dst=rank)


def receive(buffer: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    """Receive a tensor from a rank of the group into the buffer; return it."""
    dist.recv(buffer, group=group, group_src=rank)
    return buffer


class Ring:
    """The ranks of a group in a circle, in its order: 0 --> 1 --> 2 --> 0.

    Each sends tensors to the next one and receives those of the one before; after as many rounds as there are ranks,
    they are back.
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
