"""What can't be trained here is refused in a sentence, before or in the first update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import in_world
from torch import Tensor, nn

import lockstep


class SparseTable(small.Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, sparse=True)

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points + self.table((points[:, 0] > 0).long()))


class Complex(small.Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, points: Tensor) -> Tensor:
        return super().forward((points.to(torch.cfloat) @ self.turn).real)


class Lazy(small.Net):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(4)

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(self.lazy(points))


class TwoLosses(small.CrossEntropy):
    def loss_sum(self, outputs: Tensor, batch: Any) -> Any:
        loss = super().loss_sum(outputs, batch)
        return loss, loss


ONE = {"batch": {"global_size": 2, "micro_size": 1}}


@pytest.mark.parametrize(
    ("given", "sections", "says"),
    [
        ({"model": SparseTable}, {}, "model: table.weight has sparse gradients"),
        ({"model": Complex}, {}, "model: turn is complex64"),
        ({"model": Lazy}, {}, "model: lazy.weight of a LazyLinear has no shape before the first forward"),
        ({"objective": TwoLosses}, {}, "objective: loss_sum returned a tuple"),
        ({"model": small.WithBatchNorm}, ONE, "batch: batch norm needs more than one value"),
    ],
)
def test_it_is_refused_in_a_sentence(given: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    asked = small.config(**sections)
    if "model" in given:
        del asked["model"]
    made = {name: make() for name, make in given.items()}
    with pytest.raises(lockstep.ConfigError) as refused, lockstep.session(asked, **made) as session:
        next(iter(session))
    assert str(refused.value).startswith(says)


def test_an_optimizer_that_knows_no_divided_parameters_is_refused_under_fsdp() -> None:
    for message in in_world(2, _under_rprop, small.config(parallel={"strategy": "fsdp"})):
        assert message.startswith("parallel.strategy: fsdp ")
        assert gives(message, "DTensors", "custom optimizer", "optim.name", "parallel.strategy: ddp")


def _under_rprop(asked: dict[str, Any]) -> str:
    with (
        small.in_group(),
        pytest.raises(lockstep.ConfigError) as refused,
        lockstep.session(asked, optimizer=lambda groups: torch.optim.Rprop(groups, lr=0.01)) as session,
    ):
        next(iter(session))
    return str(refused.value)
