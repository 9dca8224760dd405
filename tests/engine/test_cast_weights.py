"""Which parameters autocast casts: found on fake tensors, or by the class of their module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.cast_weights import cast_weights

CPU = torch.device("cpu")


class Net(nn.Module):
    """Attributes:
    reads: whether the forward reads a value, which a fake tensor doesn't have.
    """

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.calls = 0
        self.embedding = nn.Embedding(8, 4)
        self.place = nn.Parameter(torch.zeros(1, 4))
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.mixing = nn.Parameter(torch.zeros(4, 4))
        self.exact = nn.Linear(4, 4)
        self.scaled = Scaled(4, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x: Any = self.norm(self.embedding(tokens) + self.place)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
        x = self.scaled(self.inner(x)) @ self.mixing
        if self.reads and x.sum().item() > 1e9:
            x = -x
        return self.head(x)  # type: ignore[no-any-return]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 2, self.bias)


OF_PRODUCTS = {"inner.weight", "inner.bias", "unused.weight", "unused.bias"}


@pytest.mark.parametrize(
    ("reads", "expected"),
    [(False, {*OF_PRODUCTS, "mixing", "scaled.bias"}), (True, OF_PRODUCTS)],
)
def test_parameters_that_are_cast_wherever_they_are_used(reads: bool, expected: set[str]) -> None:
    """What is used outside of autocast, in fp32 too, or after arithmetic stays fp32."""
    net = Net(reads=reads)
    before = {name: id(tensor) for name, tensor in net.named_parameters()}
    drawn = torch.get_rng_state()
    names = cast_weights(net, {"tokens": torch.zeros(2, 3, dtype=torch.int64)}, torch.bfloat16, CPU, nullcontext)
    assert names == expected
    assert {name: id(tensor) for name, tensor in net.named_parameters()} == before
    assert net.calls == 0
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_model_without_values_is_enough() -> None:
    with torch.device("meta"):
        net = Net(reads=False)
    names = cast_weights(net, (torch.zeros(2, 3, dtype=torch.int64),), torch.float16, CPU, nullcontext)
    assert "inner.weight" in names
