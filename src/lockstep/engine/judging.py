"""An evaluation's sums, whatever way a batch takes through the model.

batch --> outputs (in autocast) --> loss sum, count, metric sums (fp32) --> added up in fp64; filler adds zeros
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import EvaluatedObjective
    from lockstep.core.records import Batch

Unheard = Callable[[], AbstractContextManager[object]]
_HEARD: AbstractContextManager[object] = nullcontext()


def heard_or_not(batch: Batch, unheard: Unheard) -> AbstractContextManager[object]:
    """Around a forward: what user code logs of filler is no data."""
    return _HEARD if batch.samples else unheard()


@torch.no_grad()
def add_up(
    model: nn.Module, batches: Iterable[Batch], sums_of: Callable[[Batch], Mapping[str, Tensor]], unheard: Unheard
) -> dict[str, Tensor]:
    """Over the batches, the model in evaluation mode while it lasts."""
    sums: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            with heard_or_not(batch, unheard):
                found = sums_of(batch)
            for name, value in found.items():
                value = value.double() if batch.samples else torch.zeros_like(value, dtype=torch.float64)
                sums[name] = sums[name] + value if name in sums else value
    finally:
        model.train(was_training)
    return sums


def sums_of_outputs(objective: EvaluatedObjective, outputs: object, batch: Batch) -> dict[str, Tensor]:
    """What an evaluation adds up of one batch."""
    count = torch.tensor(float(objective.count(batch)))
    loss_sum = objective.loss_sum(outputs, batch)
    return {"loss_sum": loss_sum, "count": count, **objective.metric_sums(outputs, batch)}
