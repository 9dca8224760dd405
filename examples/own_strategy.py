"""A custom strategy: data parallelism that sums all gradients as one flat fp32 tensor, after the last backward.

python examples/own_strategy.py
lockstep train squares.yaml parallel.strategy=examples/own_strategy.py:STRATEGY --ranks 2
"""

from __future__ import annotations

import torch

import lockstep
from lockstep.sharding import (
    Builder,
    LocalStep,
    ModelState,
    Sharding,
    ShardingContext,
    SyncedBuffers,
    present_gradients,
    trainable_parameters,
)
from lockstep.strategies import MemoryUse, Section, StateSharding, Variant


class FlatOptions(Section):
    """Options of the strategy, under `parallel.flat`."""

    average: bool = False
    """Divide by the ranks before the sum, and multiply after it: for gradients near the largest number."""


class FlatStep(LocalStep):
    """The single process's step, with a sum over ranks before it."""

    def __init__(self, context: ShardingContext, optimizer) -> None:
        super().__init__(context.model, optimizer, context.squared_norm)
        self.trained = trainable_parameters(context.model)
        self.axis = context.world.axis
        self.scale = self.axis.size if STRATEGY.options_of(context.config.parallel).average else 1
        self.is_last = True

    def sync_context(self, last: bool):
        self.is_last = last
        return super().sync_context(last)

    def backward(self, loss, seed) -> None:
        super().backward(loss, seed)
        if self.is_last:
            gradients = present_gradients(self.trained)
            flat = torch.cat([gradient.float().flatten() for gradient in gradients]) / self.scale
            self.axis.sum(flat).mul_(self.scale)
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def build(context: ShardingContext) -> Sharding:
    optimizer = context.optimizer(context.model.named_parameters())
    buffers = SyncedBuffers(context.model)
    return Sharding(FlatStep(context, optimizer), ModelState(context.model, optimizer, buffers=buffers))


STRATEGY = lockstep.extend.Strategy(
    name="flat",
    build=Builder(build),
    options=FlatOptions,
    memory=MemoryUse(holds_everything=True),
    variants=(
        Variant(
            name="flat",
            mesh="replicas",
            state=StateSharding("every rank holds everything, and gradients a second time while they are summed"),
        ),
    ),
)
lockstep.extend.register_strategy(STRATEGY)

if __name__ == "__main__":
    from squares import Curve, SquaredError, points

    config = {"batch": {"global_size": 50}, "run": {"epochs": 1}, "parallel": {"strategy": "flat"}}
    lockstep.train(config, model=Curve, train_dataset=points(), objective=SquaredError(), ranks=2)
