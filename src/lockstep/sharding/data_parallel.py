"""nn.DataParallel: one process over its GPUs. The model is on the first; the others get copies for each forward.

GPU 0   model, gradient, optimizer    outputs are gathered here, so the loss is the single process's
GPU 1   a copy for each forward
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.sharding.context import Builder, Sharding, ShardingContext
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.single import LocalStep


def build(context: ShardingContext) -> Sharding:
    """Return a sharding with forwards on all GPUs of this machine; with fewer than two, the single process's."""
    model, device = context.model, context.world.device
    gpus = 0 if device.type == "cpu" else torch.get_device_module(device).device_count()
    if gpus > 1 and not context.config.run.allow_untested:
        why = "dp over several GPUs was never tested; --allow-untested tries it, ddp is faster"
        raise ConfigError(Problem("", "parallel.strategy", why))
    optimizer = context.optimizer(model.named_parameters())
    module = nn.DataParallel(model, device_ids=list(range(gpus))) if gpus > 1 else None
    return Sharding(LocalStep(model, optimizer, context.squared_norm, module), ModelState(model, optimizer))


BUILDER = Builder(build)
