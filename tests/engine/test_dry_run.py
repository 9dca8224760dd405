"""Dry runs: the tensor-parallel check compares outputs and gradients, and nothing is left of a forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kit.failures import fails
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.mesh_position import TensorParallelGroup
from lockstep.engine.dry_run import dry_run
from lockstep.engine.tensor_check import TensorCheck

CPU = torch.device("cpu")
Returns = Callable[[Tensor], Any]


def batch(points: int) -> Batch:
    return Batch(inputs=(torch.ones(points, 4),), targets=torch.zeros(points), samples=points, tokens=points)


class Differing:
    """A model whose fourth forward, the tensor-parallel one, is off by a factor."""

    def __init__(self, model: nn.Module, off: float, returns: Returns) -> None:
        self.model, self.off, self.returns = model, off, returns
        self.given: list[int] = []

    def whole_weights(self, model: nn.Module) -> nullcontext[None]:
        return nullcontext()

    def forward(self, batch: Batch) -> Any:
        (points,) = batch.inputs
        self.given.append(len(points))
        if len(points) == 1:
            raise ValueError("takes 4 points")
        made: Tensor = F.dropout(self.model(points), 0.5, self.model.training)
        if self.model.training:
            made = made + torch.rand(())
        made = made if self.model.training or len(self.given) < 4 else made * (1 + self.off)
        return self.returns(made)


@dataclass
class Made:
    first: Tensor
    cache: list[int]


def checked(off: float, returns: Returns = lambda made: made) -> Differing:
    model = Differing(nn.Linear(4, 2), off, returns)
    group = TensorParallelGroup(LocalGroup(), frozenset(), frozenset())
    TensorCheck(model.model, model.whole_weights, group, LocalGroup(), CPU).run(model.forward, [batch(1), batch(4)])
    return model


def test_a_model_that_draws_is_compared_in_evaluation_on_the_first_batch_that_works() -> None:
    assert checked(off=0.0).given == [1, 4, 4, 4]  # too few; draws; evaluated whole; evaluated sharded
    with pytest.raises(ConfigError, match=r"gradient of (weight|bias) "):
        checked(off=0.01)


RETURNS: dict[str, Returns] = {
    "a tuple": lambda made: (made, None),
    "a mapping": lambda made: {"words": ["a"], "logits": made},
    "a dataclass": lambda made: Made(made, [1]),
}


@pytest.mark.parametrize("name", RETURNS)
def test_outputs_of_any_form_are_compared(name: str) -> None:
    checked(0.0, RETURNS[name])
    with fails(ConfigError, "differs", "tensor-parallel"):
        checked(0.01, RETURNS[name])


def test_rounding_errors_are_no_difference() -> None:
    assert checked(off=1e-5).given == [1, 4, 4, 4]


class Stateful(nn.Module):
    """Changes its buffers, replaces one, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Buffer(torch.zeros(4))
        self.seen = nn.Buffer(torch.zeros(()))
        self.mask = nn.Buffer(torch.ones(4).expand(3, 4))  # no forward could write to it
        self.calls, self._means, self.of = 0, list[float](), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        self._means.append(1.0)
        self.of += 1
        self.lately = x
        self.last = x.mean(dim=0)
        return self.norm(F.dropout(x, 0.5)) + torch.rand(()) + random.random()


def test_a_dry_run_has_no_effect() -> None:
    model = Stateful()
    model.norm.eval()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    memory = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    random.seed(1)
    with dry_run(model, CPU) as drawn:
        assert not drawn()
        model.train()
        model(torch.randn(5, 4))
        assert drawn()
    assert (model.training, model.norm.training) == (True, False)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == memory
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    assert (model.calls, model._means, model.of.tolist(), "lately" in vars(model)) == (0, [], [0] * 4, False)
    after = torch.rand(()), random.random()
    torch.manual_seed(1)
    random.seed(1)
    assert after == (torch.rand(()), random.random())
    assert F.dropout(torch.ones(1000), 0.5).eq(0).any()


def test_a_dry_run_that_fails_has_no_effect() -> None:
    model = Stateful()
    with pytest.raises(ValueError, match="Expected more than 1 value"), dry_run(model, CPU):
        model(torch.randn(1, 4))
    assert float(model.seen) == 0
    assert F.dropout(torch.ones(1000), 0.5).eq(0).any()


def test_a_module_that_a_forward_replaces_is_there_again_after_a_dry_run() -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: nn.Module = nn.Linear(4, 2)

        def forward(self, points: Tensor) -> Any:
            self.inner = nn.Identity()
            return self.inner(points)

    model = Switching()
    before = model.inner
    with dry_run(model, CPU):
        model(torch.ones(1, 4))
    assert model.inner is before
