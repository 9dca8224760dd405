"""Forward and backward through the stages of a pipeline: the micro-batches are the accumulation.

    rank 0   F0 F1 F2    B0 F3 B1    B2    B3        1f1b, two stages: a stage computes on one micro-batch while the
    rank 1      F0 B0 F1 B1    F2 B2 F3 B3           next one computes on the one before

Every rank of a pipeline has the micro-batches; between stages goes what blocks hand on, and back goes its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.core.errors import Failure
from lockstep.core.out_of_memory import mark
from lockstep.engine.judging import Unheard, add_up, heard_or_not, sums_of_outputs
from lockstep.engine.staging import Order, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis, EvaluatedObjective, Sharding
    from lockstep.core.records import Batch, GlobalBatch, Inputs
    from lockstep.engine.cutting import Cut, Hidden
    from lockstep.engine.eager import Autocast
    from lockstep.plan.stages import Schedule


class Pipelined:
    """The engine of a model that is cut into stages.

    Args:
        cut: this rank's part.
        axis: the ranks of the pipeline; `group` is theirs.
        key_draws: called with (step, micro-batch, stage) before each forward.
        autocast, unheard: as of `engine.eager.Eager`.
    """

    def __init__(
        self,
        sharding: Sharding,
        objective: EvaluatedObjective,
        autocast: Autocast,
        key_draws: Callable[[int, int, int], None],
        unheard: Unheard,
        *,
        cut: Cut,
        schedule: Schedule,
        axis: Axis,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._sharding = sharding
        self._objective = objective
        self._autocast = autocast
        self._key_draws = key_draws
        self._unheard = unheard
        self._cut = cut
        self._schedule = schedule
        self._axis = axis
        self._group = group
        self._device = device
        self._orders: dict[int, tuple[Order, list[Stage]]] = {}
        self._batch: GlobalBatch | None = None
        self._scale: float | Tensor = 1.0
        self._total = torch.zeros((), device=device)
        self._backwards = 0

    @property
    def _has_last(self) -> bool:
        return self._cut.stages - 1 in self._cut.mine

    def accumulate(
        self,
        batch: GlobalBatch,
        seed_scale: float | Tensor,
        announce: Callable[[Tensor], None],
    ) -> None:
        """See `core.protocols.Engine`. Losses are known on the last stage's rank; the others announce none."""
        micro_batches = batch.micro_batches
        with self._autocast():
            handed = [self._cut.handed(micro_batch.inputs) for micro_batch in micro_batches]
        order, stages = self._order(len(micro_batches), handed[0])
        for stage in stages:
            stage.expect(handed)
        self._batch, self._scale = batch, seed_scale
        self._total = torch.zeros((), device=self._device)
        self._backwards = len(micro_batches) * len(stages)
        try:
            with self._sharding.window(False):
                order.run()
        except RuntimeError as error:  # torch wraps what a stage raises
            if isinstance(error.__cause__, Failure):
                raise error.__cause__ from None
            mark(error, "backward", f"in the pipeline's schedule of update {batch.step + 1}")
            raise
        finally:
            self._batch = None
        announce(self._total)

    def _order(self, micro_batches: int, handed: Sequence[Hidden]) -> tuple[Order, list[Stage]]:
        if micro_batches not in self._orders:
            cut = self._cut
            stages = [
                Stage(
                    number,
                    cut.stages,
                    self._device,
                    self._group,
                    self._compute,
                    list(cut.parameters_of(number)),
                    handed,
                    self._window,
                )
                for number in cut.mine
            ]
            order = Order(self._schedule, stages, self._axis.size, micro_batches)
            order.prepare()
            self._orders[micro_batches] = order, stages
        return self._orders[micro_batches]

    def _compute(self, stage: int, hidden: Tensor | None, number: int) -> Any:
        batch = self._batch
        assert batch is not None, "a stage computes in an update"
        micro_batch = batch.micro_batches[number]
        self._key_draws(batch.step, number, stage)
        try:
            with heard_or_not(micro_batch, self._unheard):
                with self._autocast():
                    found = self._cut.run(stage, hidden, micro_batch.inputs)
                return self._seeded(found, micro_batch) if stage == self._cut.stages - 1 else found
        except Exception as error:
            micro = f"micro-batch {number + 1} of {len(batch.micro_batches)}, update {batch.step + 1}"
            mark(error, "forward", f"in stage {stage + 1}'s forward pass of {micro}")
            raise

    def alone(self, stage: int, batch: Batch) -> object:
        """What a stage makes apart from the others, given noise: to be looked at."""
        noise = torch.Generator().manual_seed(stage)
        with self._autocast():
            handed = self._cut.handed(batch.inputs)[stage]
            given = torch.randn(handed.shape, generator=noise).to(self._device, handed.dtype).requires_grad_()
            return self._cut.run(stage, given if stage else None, batch.inputs)

    def _seeded(self, outputs: object, micro_batch: Batch) -> Tensor:
        """What the backward of a micro-batch starts from."""
        loss = self._objective.loss_sum(outputs, micro_batch)
        if not micro_batch.samples:
            return loss * 0.0
        self._total = self._total + loss.detach()
        return loss * self._scale

    def _window(self) -> AbstractContextManager[object]:
        """Around a backward that gives weights their gradients."""
        self._backwards -= 1
        return self._sharding.window(self._backwards == 0)

    # --- evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> object:
        """See `core.protocols.Engine`."""
        with self._autocast():
            found = self._through(inputs)
        return found if self._has_last else None

    def evaluate(self, micro_batches: Iterable[Batch]) -> Mapping[str, Tensor]:
        """See `core.protocols.Engine`; the same on all ranks of the pipeline."""
        return self._told(add_up(self._cut.model, micro_batches, self._sums, self._unheard))

    def _through(self, inputs: Inputs) -> Any:
        """This rank's stages, one after the other; of the last one the model's outputs."""
        cut, outputs = self._cut, None
        handed = cut.handed(inputs)
        for stage in cut.mine:
            given = None
            if stage > 0:
                given = self._receive(handed[stage], cut.owners[stage - 1], outputs)
            outputs = cut.run(stage, given, inputs)
            if stage < cut.stages - 1 and cut.owners[stage + 1] != self._axis.rank:
                dist.send(outputs.contiguous(), group=self._group, group_dst=cut.owners[stage + 1])
        return outputs

    def _receive(self, hidden: Hidden, source: int, own: Any) -> Tensor:
        if source == self._axis.rank:
            found: Tensor = own
            return found
        buffer = torch.empty(hidden.shape, dtype=hidden.dtype, device=self._device)
        dist.recv(buffer, group=self._group, group_src=source)
        return buffer

    def _sums(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.outputs(batch.inputs)
        return sums_of_outputs(self._objective, outputs, batch) if self._has_last else {}

    def _told(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The last stage's, to the others."""
        numbers = {name: value.item() for name, value in sums.items()} if self._has_last else None
        everywhere = self._axis.gather(numbers)
        found: Any = everywhere[self._cut.owners[-1]]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
