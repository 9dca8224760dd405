"""The builder of a strategy: its arguments and its result.

    Builder.shard(context)    shards the parameters before they have memory, if the strategy does
    Builder.build(context)    -> Sharding: the gradient step and the model state, on the rank's device

A strategy's builder is "module:NAME"; all builders have these signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lockstep.config.schema import Config
    from lockstep.core.protocols import GradientStep, Optimizer
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.distributed.shard_boxes import RowShards
    from lockstep.optim.optimizers import Elementwise
    from lockstep.plan.plan import Plan
    from lockstep.sharding.model_state import ModelState
    from lockstep.sharding.partition import ModelPartition

SquaredNorm = Callable[[Sequence["Tensor"]], "Tensor"]
"""Sum of the squares of all elements of all tensors, 0-dim."""


class OptimizerFactory(Protocol):
    """Makes the optimizer of the run for the parameters that a strategy passes to it."""

    @property
    def is_custom(self) -> bool:
        """True for a user's optimizer, which may depend on the shapes of parameters."""

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]], shards: RowShards | None = None) -> Optimizer:
        """Return the optimizer of these parameters; `shards`: how ranks hold them, if these are this rank's rows."""

    def elementwise(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Elementwise:
        """Return an optimizer that may see the parameters flattened, or raise ConfigError."""


@dataclass(frozen=True, slots=True)
class ShardingContext:
    """The arguments of a builder.

    Attributes:
        model: This rank's part of the model. For `shard` it may be on the meta device; for `build` it has its values,
            and is on `world.device`, unless `Builder.shards_in_build`.
        blocks: Names of the repeated layers that this rank holds.
        cast_weights: Names of the parameters that autocast casts wherever the model uses them.
        compute: The precision of autocast; None for fp32.
        has_values: Whether the parameters have values, which may differ between ranks until they are broadcast.
        unused_remedy: What has to change before `find_unused_parameters` can be set ("leave x out and "); may be empty.
    """

    model: nn.Module
    config: Config
    plan: Plan
    world: World
    position: MeshPosition
    blocks: Sequence[str]
    partition: ModelPartition
    optimizer: OptimizerFactory
    squared_norm: SquaredNorm
    cast_weights: frozenset[str]
    compute: torch.dtype | None
    has_values: bool
    unused_remedy: str


class Sharding(NamedTuple):
    """A strategy in use on this rank.

    Attributes:
        loss_sum: Returns the update's sum of losses over all ranks, 0-dim, once the gradient is reduced, if the
            strategy adds it in an order of its own; None: the vote adds it.
        rounds_to_fp16: Whether gradients pass through fp16 outside of autocast, so that they need a loss scale.
    """

    step: GradientStep
    state: ModelState
    loss_sum: Callable[[], Tensor] | None = None
    rounds_to_fp16: bool = False

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's gradient summed over ranks, whole, on the CPU, once the last `sync_context` is closed.

        To be exhausted, by all ranks together.

        Args:
            wanted: False on a rank that only takes part in the gathering: it yields nothing.
        """
        return self.state.whole(self.step.gradients(), wanted=wanted)


@dataclass(frozen=True, slots=True)
class Builder:
    """The part of a strategy that needs torch.

    Attributes:
        build: Returns the strategy in use.
        shard: Shards the parameters in place before they have memory; None: they are whole when they get it.
        shards_in_build: Whether `build` shards parameters that are on the meta device. Their values are set afterwards,
            in `ModelState.flat`.
    """

    build: Callable[[ShardingContext], Sharding]
    shard: Callable[[ShardingContext], None] | None = None
    shards_in_build: Callable[[Config], bool] = lambda config: False
