"""The parts of a session: components built from a config, the saves of a run, its state after a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lockstep.core.errors import RunFailed
from lockstep.core.formatting import listed
from lockstep.distributed import generators

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from lockstep.config.schema import Config
    from lockstep.core.protocols import Engine, EvaluatedObjective, Source
    from lockstep.core.records import SaveReport
    from lockstep.data.loader import TrainingLoader
    from lockstep.distributed.consensus import Consensus
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.distributed.rng import KeyedDraws
    from lockstep.loop.readback import Readback
    from lockstep.loop.text import Answers
    from lockstep.models.metrics import EvaluationMetrics
    from lockstep.models.model_tensors import ModelTensors
    from lockstep.optim.precision import LossScaler
    from lockstep.plan.plan import Plan
    from lockstep.sharding.buffers import BufferSnapshot
    from lockstep.sharding.context import Sharding

Rate = Callable[[float, int, int | None], float]
"""The learning rate by fraction of the run done, step from 0, and steps of the run or None."""


class Purpose(Enum):
    """Purpose of a session. If other weights follow, initial values are drawn only if a check needs them."""

    TRAIN = "train from initial values"
    RESUME = "train from a checkpoint"
    EVALUATE = "evaluate weights, without an optimizer"


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """The parts of evaluations: sets by name in the order of the config, metrics, samples per forward of a rank."""

    sets: Mapping[str, Source]
    metrics: EvaluationMetrics
    answers: Answers | None
    micro_size: int
    draws: KeyedDraws


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """The parts of an update."""

    consensus: Consensus
    readback: Readback
    scaler: LossScaler
    rate: Rate


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a run on one rank, as `assemble` builds them.

    Attributes:
        tensors: names and shapes of the whole model's tensors.
        base: what the base of an adapter is; None: there is no adapter, or its base depends on the config only.
        companion: what the companion is; None: there is none, or it depends on the config only.
        coupled: why the loss of a batch is not a sum over its samples; None if it is.
        open_checkpoints: see `Session.checkpoints`.
        draw: sets the parameters to their initial values, if that was left to a checkpoint; no collective.
        precompute: computes what batches need of the companion, if that is done once, or reads it from the run's
            folder, if there is one; all ranks together.
    """

    config: Config
    plan: Plan
    world: World
    position: MeshPosition
    objective: EvaluatedObjective
    sharding: Sharding
    tensors: ModelTensors
    base: Mapping[str, str | None] | None
    companion: Mapping[str, str | None] | None
    engine: Engine
    loader: TrainingLoader
    source: Source
    evaluation: EvaluationParts
    update: UpdateParts
    coupled: str | None
    flops_per_token: float | None
    open_checkpoints: Callable[..., Saves]
    draw: Callable[[], None]
    precompute: Callable[[Path | None], None]


class Saves:
    """The saves of a run, as its session sees them; this one saves nothing. `Checkpoints` does.

    Attributes:
        resumed_from: the step that this attempt resumed from; None: it started from the beginning.
    """

    resumed_from: int | None = None

    def save(self) -> None:
        """Start a save of the session as it is, in the background."""

    def finish(self) -> list[SaveReport]:
        """Wait for the current save; return the saves that have ended since the last call, on all ranks."""
        return []

    def status(self) -> tuple[int, int]:
        """Return what this rank adds to the vote: finished saves, and how many of them failed."""
        return 0, 0

    def receive(self, settled: float, failed: float) -> None:
        """Receive the sums of all ranks' `status`."""

    def resumes_from(self) -> int | None:
        """Return the step that the run would resume from; None: from the beginning."""
        return None

    def close(self) -> None:
        """Wait for what this rank still saves, and unlock the place of the checkpoints."""

    def rescue(self, error: BaseException) -> str | None:
        """Save the state of a run that `error` ends, if possible; return what to report, None if nothing."""
        return None


class FailureState:
    """The state that an error in the middle of an update leaves behind, and how to undo it.

    Attributes:
        fails_together: all ranks know that one of them fails, and have finished the same update.
        accumulating: forwards of an update have begun, and it has not ended.
        updating: an update has begun to change parameters and optimizer state, and has not ended.
        buffers: copies of the model's buffers; None: none are kept.
    """

    def __init__(self, fails_together: bool, buffers: BufferSnapshot | None = None) -> None:
        self.fails_together = fails_together
        self.updating = False
        self.buffers = buffers
        self.accumulating = False

    def begin_forward(self) -> None:
        """Copy the buffers, which a forward may change; not again if a micro-batch is repeated."""
        if self.buffers is not None and not self.accumulating:
            self.buffers.take()
        self.accumulating = True

    def refuse_half_update(self, saves: Saves) -> None:
        """Raise RunFailed if an update has begun to change parameters and optimizer state, and was interrupted."""
        if self.updating:
            step = saves.resumes_from()
            then = "to start over" if step is None else f"to resume from step {step:,}"
            raise RunFailed(f"an update was interrupted in its middle; leave the session and open it again, {then}")

    def discard_attempt(self, sharding: Sharding, rate: Callable[[], float]) -> None:
        """Undo what an unfinished attempt at an update has changed in gradients and buffers, if there is one."""
        if self.accumulating:
            sharding.step.update(rate(), 1.0, False)
            self.undo_forward(sharding.state.model)

    def updated(self, keep: bool | Tensor) -> None:
        """End an update: if it isn't kept, restore the buffers that its forwards have changed."""
        if self.buffers is not None:
            self.buffers.put_back(unless=keep)
        self.accumulating = self.updating = False

    def inconsistency(self, model: nn.Module) -> str | None:
        """Return why the state can't be restored to that after the last update; None if it is that state."""
        if self.updating:
            return "the failure came in the middle of an update"
        lost = self.undo_forward(model)
        return f"the forward that failed may have changed {listed(lost, 3)}" if lost else None

    def undo_forward(self, model: nn.Module) -> list[str]:
        """Restore the buffers that forwards have changed since the last update; return what else may have changed."""
        if not self.accumulating:
            return []
        lost = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if self.buffers is not None:
            self.buffers.put_back()
            lost -= self.buffers.names
        return [*sorted(lost), *generators.registered()]
