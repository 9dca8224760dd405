"""Every strategy from its parts: the model, the optimizer, the place of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.config.deepspeed import derived_of, engine_config
from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.mesh_position import stage_pair
from lockstep.optim.groups import parameter_groups
from lockstep.optim.norms import squared_norm
from lockstep.optim.optimizers import Elementwise, adapt_optimizer, build_elementwise, build_optimizer
from lockstep.optim.own_settings import groups_to_make_of
from lockstep.plan.refusals import before_unused
from lockstep.sharding.buffers import SharedBuffers
from lockstep.sharding.data_parallel import over_gpus
from lockstep.sharding.ddp import ReplicatedByDDP
from lockstep.sharding.in_backward import UpdatedInBackward
from lockstep.sharding.invariant import Invariant
from lockstep.sharding.pieces import Across, Pieces
from lockstep.sharding.single import Single
from lockstep.training.user_objects import UserObjects

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Optimizer, Sharding, Source
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.engine.cutting import Cut
    from lockstep.models.blank import Blank
    from lockstep.models.weight_matching import WeightMatch
    from lockstep.plan.grouping import Grouping
    from lockstep.plan.plan import Plan


_NO_GROUPS = "doesn't support per-parameter options"
"""As torch's LBFGS refuses groups."""


class OptimizerOf:
    """Makes the optimizer of the parameters that a strategy gives it.

    Args:
        groups: of the whole model's parameters.

    Attributes:
        users: it is one that was handed over, of which nothing is known.
        used: the settings that hold, some of which an optimizer that was handed over may state; known once it is made.
    """

    def __init__(self, config: Config, given: UserObjects, groups: Sequence[Grouping]) -> None:
        self._optim = config.optim
        self._groups = groups
        self._make = given.optimizer
        self.users = given.optimizer is not None
        self.used = config.optim

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        groups = parameter_groups(parameters, self._optim, self._groups)
        if self._make is None:
            return build_optimizer(self._optim, groups)
        optimizer, self.used = adapt_optimizer(self._made(groups_to_make_of(groups, self._optim)), self._optim)
        return optimizer

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        assert self._make is not None, "the caller has looked"
        try:
            return self._make(groups)
        except ValueError as error:
            if _NO_GROUPS not in str(error):
                raise
            why = (
                f"{error}, and a run sets the learning rate and weight decay of each group; take an optimizer that "
                "takes groups and whose step() needs no closure, such as torch.optim.AdamW"
            )
            raise ConfigError(Problem("", "optimizer", why)) from error

    def elementwise(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Elementwise:
        """For a strategy that lays the elements of all parameters end to end, and makes the step by itself."""
        if self.users:
            raise ConfigError(
                "an optimizer that was handed over may look at a parameter's shape, and DeepSpeed gives it flat parts; "
                "name one in optim.name, or take parallel.strategy: fsdp, or ddp"
            )
        return build_elementwise(self._optim, parameter_groups(parameters, self._optim, self._groups))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a strategy is made of.

    Attributes:
        model: on the CPU; without values if it is `blank`'s.
        start: what goes into it when it has values.
        blocks: names of the repeated layers of the whole model.
        names: of the tensors of the whole model, in order.
        cut: this rank's stages; None: it has the whole model.
        across: with whom it shares each matrix; None: with nobody.
        on_trial: how its matrices are divided, by a plan that isn't ours; styles by names of modules.
        source: of the training samples.
    """

    config: Config
    world: World
    plan: Plan
    model: nn.Module
    optimizer_of: OptimizerOf
    blank: Blank | None
    start: WeightMatch | None
    place: MeshPosition
    blocks: Sequence[str]
    names: Sequence[str]
    cut: Cut | None
    across: Across | None
    on_trial: Mapping[str, str]
    source: Source

    def fill(self) -> None:
        """Gives a model without values memory and values."""
        if self.blank is None:
            return
        self.blank.fill(self.world.device)
        if self.start is not None:
            self.start.put(self.model)

    def make_pieces(self) -> Pieces:
        """Who holds what of the model. All ranks together, once: a group may be made."""
        place, cut = self.place, self.cut
        shared = cut.shared if cut is not None else ()
        ends = stage_pair(place, cut.owners[0], cut.owners[-1]) if cut is not None and shared else LocalGroup()
        return Pieces(
            self.model,
            self.names,
            place.pipeline,
            shared=shared,
            ends=ends,
            device=self.world.device,
            across=self.across,
        )


def sharding_of(parts: Parts) -> Sharding:
    """Of the strategy that is planned."""
    if parts.plan.strategy != "fsdp":  # which divides first
        parts.fill()
    if parts.config.run.determinism == "invariant":
        return _invariant(parts)
    if parts.plan.strategy == "ddp" and parts.plan.mesh.pieces > 1:
        return _replicas(parts)  # DistributedDataParallel takes a whole model
    return _SHARDING[parts.plan.strategy](parts)


def _single(parts: Parts) -> Sharding:
    model = parts.model.to(parts.world.device)
    if parts.config.optim.in_backward:
        return UpdatedInBackward(model, parts.optimizer_of(model.named_parameters()), squared_norm)
    return Single(model, parts.optimizer_of(model.named_parameters()), squared_norm)


def _data_parallel(parts: Parts) -> Sharding:
    model = parts.model.to(parts.world.device)
    gpus = torch.cuda.device_count() if parts.world.device.type == "cuda" else 0
    if gpus > 1 and not parts.config.run.allow_untested:
        why = "dp over several GPUs was never tested; --allow-untested tries it, ddp is faster"
        raise ConfigError(Problem("", "parallel.strategy", why))
    return over_gpus(model, parts.optimizer_of(model.named_parameters()), squared_norm, gpus)


def _ddp(parts: Parts) -> Sharding:
    model, world = parts.model.to(parts.world.device), parts.world
    return ReplicatedByDDP(
        model,
        parts.optimizer_of(model.named_parameters()),
        squared_norm,
        parts.config.parallel.ddp,
        ranks=world.axis.size,
        device=world.device,
        backend=world.backend,
    )


def _invariant(parts: Parts) -> Sharding:
    model, world = parts.model.to(parts.world.device), parts.world
    optimizer = parts.optimizer_of(model.named_parameters())
    return Invariant(model, optimizer, squared_norm, world.axis, int(parts.config.parallel.ddp.bucket_mb * 2**20))


def _fsdp(parts: Parts) -> Sharding:
    from lockstep.sharding.fsdp import ShardedByFSDP, same_order, shard  # DTensors take 0.5 s to import

    model, options, place = parts.model, parts.config.parallel.fsdp, parts.place
    find_unused = parts.config.parallel.ddp.find_unused_parameters
    blocks = parts.blocks if parts.cut is None else parts.cut.blocks
    shard(model, options, place, parts.world.device, blocks)
    parts.fill()
    return ShardedByFSDP(
        model,
        parts.optimizer_of,
        squared_norm,
        options,
        place,
        parts.make_pieces(),
        whole=parts.optimizer_of.users,
        order=same_order(
            model, place, parts.world.device, find_unused=find_unused, before_unused=_before_unused(parts)
        ),
    )


def _before_unused(parts: Parts) -> str:
    return before_unused(parts.plan.strategy, parts.plan.mesh)


def _replicas(parts: Parts) -> Sharding:
    from lockstep.sharding.replicas import Replicas

    model = parts.model.to(parts.world.device)
    buffers = SharedBuffers(model, parts.place.data_parallel_group)
    return Replicas(
        model, parts.optimizer_of, squared_norm, parts.place.data, parts.make_pieces(), buffers, _before_unused(parts)
    )


def _deepspeed(parts: Parts) -> Sharding:
    from lockstep.sharding.deepspeed import DividedByDeepSpeed, ReplicatedByDeepSpeed, engage

    model, device = parts.model.to(parts.world.device), parts.world.device
    handed = engine_config(parts.config, derived_of(parts.plan))
    if parts.config.parallel.deepspeed.zero_stage == 0:
        optimizer = parts.optimizer_of(model.named_parameters())
        idle = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])  # DeepSpeed wants one to begin
        return ReplicatedByDeepSpeed(engage(model, idle, handed, device), model, optimizer, squared_norm)
    rule = parts.optimizer_of.elementwise(model.named_parameters())
    engine = engage(model, rule.optimizer, handed, device)
    return DividedByDeepSpeed(
        engine,
        model,
        squared_norm,
        rule.entries,
        counts=rule.counts,
        device=device,
        before_unused=_before_unused(parts),
    )


_SHARDING: Mapping[str, Callable[[Parts], Sharding]] = {
    "single": _single,
    "dp": _data_parallel,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
}
