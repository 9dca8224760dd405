"""Cross-entropy of logits sharded by the vocabulary has the value and the gradient of the full logits'."""

from __future__ import annotations

import pytest
import torch
from kit.worlds import in_world
from torch import distributed as dist

from lockstep.core.records import IGNORED
from lockstep.models.objectives import cross_entropy_sum


def _sharded_loss(vocabulary: int, smoothing: float) -> tuple[float, list[float]]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    try:
        logits, targets = _batch(vocabulary)
        sharded = distribute_tensor(logits, init_device_mesh("cpu", (2,)), [Shard(2)]).requires_grad_()
        loss = cross_entropy_sum(sharded, targets, smoothing)
        loss.backward()
        gradient = sharded.grad.full_tensor()  # type: ignore[union-attr]
        return loss.item(), gradient.flatten().tolist()
    finally:
        dist.destroy_process_group()


def _batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(2, 5, vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (2, 5), generator=generator)
    targets[0, 1] = IGNORED
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [7, 1], ids=["uneven shards", "an empty shard"])
def test_value_and_gradient_are_those_of_full_logits(vocabulary: int, smoothing: float) -> None:
    logits, targets = _batch(vocabulary)
    expected = cross_entropy_sum(logits.requires_grad_(), targets, smoothing)
    expected.backward()
    for loss, gradient in in_world(2, _sharded_loss, vocabulary, smoothing):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(torch.tensor(gradient), logits.grad.flatten())
