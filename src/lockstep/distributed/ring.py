"""Ranks in a circle: each sends tensors to the next one and receives as many from the one before.

0 --> 1 --> 2 --> 0        after as many rounds as there are ranks, what a rank has sent is back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """The ranks of a group, in its order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._group = group
        self.size = len(ranks)
        self.rank = group.rank()
        self._next = ranks[(self.rank + 1) % self.size]
        self._before = ranks[(self.rank - 1) % self.size]

    def pass_on(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start sending; return what waits, and returns what was received: of the same shapes and dtypes.

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
