"""nn.DataParallel: one process over its GPUs. The model lives on the first; the others are given copies for a forward.

GPU 0   model, gradient, optimizer    outputs gathered here, so the loss is the single process's
GPU 1   a copy for each forward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lockstep.sharding.single import Single, SquaredNorm

if TYPE_CHECKING:
    from lockstep.core.protocols import Optimizer


def over_gpus(model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm, gpus: int) -> Single:
    """The model on GPU 0, its forwards spread over `gpus` GPUs; with fewer than two, plainly single."""
    if gpus < 2:
        return Single(model, optimizer, squared_norm)
    return Single(model, optimizer, squared_norm, nn.DataParallel(model, device_ids=list(range(gpus))))
