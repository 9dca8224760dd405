"""Parameters that not every rank's samples use: experts, branches.

             rank 0   rank 1             sent by FSDP     after the last micro-batch
expert 0     used     used               both             gradient
expert 1     used     -                  both, a zero     gradient
expert 2     -        -                  both, a zero     none: an optimizer leaves it alone, as on one process

Left to itself FSDP2 sends what a rank has: of different lengths, which gloo dies of. It can send zeros in their place,
but then no longer says for what; so each of its groups is looked at before it sends. How is private to torch, and known
in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule


class UnusedParameters:
    """Args:
    modules: all that are divided.

    Raises:
        ConfigError: this torch can't send zeros.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._used: set[int] = set()
        for module in modules:
            one: Any = module
            if not hasattr(one, "set_reduce_scatter_unused_params"):
                message = f"true needs torch 2.13 under fsdp, and this is {torch.__version__}"
                raise ConfigError(Problem("", "parallel.ddp.find_unused_parameters", message))
            one.set_reduce_scatter_unused_params(True, recurse=False)
            for group in one._get_fsdp_state()._fsdp_param_groups:
                group.post_backward = partial(self._look, group, group.post_backward)

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Takes the gradient from those that no rank has used since the last time. All ranks together."""
        if not parameters:
            return
        mine = [float(id(parameter) in self._used) for parameter in parameters]
        used = torch.tensor(mine, device=parameters[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, somewhere in zip(parameters, used.tolist(), strict=True):
            if not somewhere:
                parameter.grad = None
        self._used.clear()

    def _look(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        for one in group.fsdp_params:
            if not hasattr(one, "_unsharded_param"):
                continue
            if one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None:
                self._used.add(id(one.sharded_param))
        post_backward(*unused)
