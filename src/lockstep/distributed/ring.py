"""Ranks in a circle: each hands tensors to the next one and gets as many from the one before.

0 --> 1 --> 2 --> 0        after as many rounds as there are ranks, what a rank has given is back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """Args:
    group: its ranks, in the order of the circle.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._group = group
        self.size = len(ranks)
        self.rank = group.rank()
        self._next = ranks[(self.rank + 1) % self.size]
        self._before = ranks[(self.rank - 1) % self.size]

    def pass_on(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts it; what is returned waits, and gives what has come: of the same shapes and dtypes.

        The tensors must be left as they are until then.
        """
        given = [tensor.contiguous() for tensor in tensors]
        came = [torch.empty_like(tensor) for tensor in given]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, self._next, self._group) for tensor in given]
            + [dist.P2POp(dist.irecv, tensor, self._before, self._group) for tensor in came]
        )

        def finish() -> list[Tensor]:
            for work in works:
                work.wait()
            del given[:]  # kept alive until they were sent
            return came

        return finish
