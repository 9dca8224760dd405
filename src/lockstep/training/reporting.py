"""Builds the report of an update once its numbers have arrived, and records them.

slots of the vote, norm, verdict --> ranks agree? --> verdicts, ledger, saves --> StepReport
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import ReplicasDiffer
from lockstep.core.records import StepReport
from lockstep.distributed.consensus import FIRST_REQUEST, FIRST_TALLY, gradients_agree, requests_in
from lockstep.resilience.guard import ranks_differ

if TYPE_CHECKING:
    from lockstep.core.progress import Progress
    from lockstep.core.records import GlobalBatch
    from lockstep.resilience.spikes import Limits
    from lockstep.resilience.verdicts import Verdicts
    from lockstep.training.components import VoteParticipant
    from lockstep.training.ledger import Ledger
    from lockstep.training.replicas import Difference


@dataclass(slots=True)
class Books:
    """The records that each update is added to.

    Attributes:
        ranks: Number of ranks in the vote.
        difference: Returns how the ranks' copies of the state differ; all ranks together.
        saves: Receives the sums of the ranks' finished saves.
        began: When the run's first update began, on `time.perf_counter`'s clock.
    """

    ranks: int
    verdicts: Verdicts
    ledger: Ledger
    difference: Callable[[], Difference | None]
    saves: VoteParticipant
    began: float

    def reporter(
        self, batch: GlobalBatch, progress: Progress, rate: float, tokens: int, limits: Limits
    ) -> Callable[[list[float], float, bool, float, float], StepReport]:
        """Return what makes the report of the update that led to `progress`, of its numbers."""

        def report(slots: list[float], norm: float, keep: bool, scale: float, count: float) -> StepReport:
            if self.ranks > 1 and not gradients_agree(slots, self.ranks):
                fault = self.difference()
                text, ranks = ("", ()) if fault is None else (f"; {fault.text}", fault.ranks)
                raise ReplicasDiffer(f"{ranks_differ(progress.steps - 1)}{text}", ranks)
            loss = slots[0] / (count or 1.0)
            result, spike = self.verdicts.see(progress.steps, loss, norm, limits, count=count, keep=keep)
            digest, settled, failed = slots[FIRST_TALLY:FIRST_REQUEST]
            self.ledger.add(progress.samples - batch.samples, progress.samples, digest)
            self.saves.receive(settled, failed)
            return StepReport(
                step=progress.steps,
                samples=progress.samples,
                tokens=progress.tokens,
                epoch=batch.epoch,
                loss=loss if count or not keep else math.nan,
                count=count,
                grad_norm=norm,
                lr=rate,
                verdict=result,
                loss_scale=scale,
                discarded=self.verdicts.discarded,
                seconds=time.perf_counter() - self.began,
                update_samples=batch.samples,
                update_tokens=tokens,
                requests=requests_in(slots),
                spike=spike,
            )

        return report
