"""Parameters change in the optimizer's step alone, and those that are trained stay those of the start."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from kit import small
from kit.failures import fails
from torch import Tensor

import lockstep


class Following(small.Net):
    """A net whose bias follows something else in its forward, from an update on."""

    def __init__(self, how: str, first: int = 1) -> None:
        super().__init__()
        self.how, self.first, self.forwards = how, first, 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, points: Tensor) -> Tensor:
        self.forwards += self.training
        bias, mean = self.head.bias, points.detach().mean(dim=0)[:3]
        if self.training and self.forwards >= self.first:
            if self.how == "in place":
                with torch.no_grad():
                    bias.copy_(mean)
            elif self.how == "by its data":
                bias.data.copy_(mean)
            elif self.how == "other data":
                bias.data = mean
            self.mean.copy_(mean)
        return super().forward(points)


def _session(model: torch.nn.Module) -> lockstep.Session:
    asked = small.config(batch={"global_size": 8, "micro_size": 8})
    asked.pop("model", None)
    return lockstep.session(asked, model=model)


@pytest.mark.parametrize("how", ["in place", "by its data", "other data"])
@pytest.mark.parametrize("first", [1, 4])
def test_a_parameter_that_a_forward_writes_to_is_refused_at_once_or_soon(how: str, first: int) -> None:
    with _session(Following(how, first)) as session:
        reports = []
        with fails(lockstep.ConfigError, "head.bias", "changed", key="model"):
            reports.extend(islice(session, 6))
        assert session.progress.steps == (0 if first == 1 else 4)


class Switching(small.Net):
    """A net that continues with another module from a forward on, as BigBird does once a batch is short."""

    def __init__(self, first: int, training: bool) -> None:
        super().__init__()
        self.first, self.at, self.forwards = first, training, 0

    def forward(self, points: Tensor) -> Tensor:
        self.forwards += 1
        if self.training is self.at and self.forwards >= self.first:
            other = torch.nn.Linear(8, 3)
            other.weight, other.bias = self.head.weight, self.head.bias
            self.head = other
        return super().forward(points)


@pytest.mark.parametrize(("first", "steps"), [(1, 0), (4, 4)])
def test_a_module_that_a_forward_replaces_is_refused_at_once_or_soon(first: int, steps: int) -> None:
    with _session(Switching(first, training=True)) as session:
        with fails(lockstep.ConfigError, "replaced head", "rank 0", key="model"):
            list(islice(session, 6))
        assert session.progress.steps == steps


def test_a_module_that_an_evaluation_replaces_is_refused() -> None:
    objects = {"model": Switching(1, training=False), "eval_datasets": {"held": small.points(8)}}
    asked = {name: section for name, section in small.config().items() if name != "model"}
    with lockstep.session(asked, **objects) as session:
        next(iter(session))
        with pytest.raises(lockstep.ConfigError, match="replaced head"):
            session.evaluate()


def test_a_forward_that_writes_to_a_buffer_trains() -> None:
    with _session(Following("not")) as session:
        assert len(list(islice(session, 6))) == 6


def test_a_parameter_that_code_changes_between_two_updates_is_refused() -> None:
    with _session(small.Net()) as session:
        updates = iter(session)
        next(updates)
        model = session._components.sharding.state.model
        model.head.weight.data.clamp_(-0.01, 0.01)
        with fails(lockstep.ConfigError, "head.weight", "changed", key="model"):
            next(updates)


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_are_frozen_or_not_in_mid_run_are_refused(trained: bool) -> None:
    model = small.Net()
    model.inner.requires_grad_(not trained)
    with _session(model) as session:
        updates = iter(session)
        for _ in range(3):
            next(updates)
        session._components.sharding.state.model.inner.requires_grad_(trained)
        with fails(lockstep.ConfigError, "requires_grad", "inner.weight, inner.bias", key="model"):
            next(updates)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision_are_refused_if_they_are_trained(dtype: torch.dtype) -> None:
    model = small.Net()
    model.inner.to(dtype)
    with fails(lockstep.ConfigError, "inner.weight, inner.bias", str(dtype).removeprefix("torch."), key="model"):
        _session(model).__enter__()


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = small.Net()
    model.head.bias = torch.nn.Parameter(model.inner.bias[:3])
    with fails(lockstep.ConfigError, "one memory", key="model"), _session(model):
        pass
