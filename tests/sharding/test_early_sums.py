"""Sums over replicas begin while the last backward runs, in buckets and in one order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.distributed.collectives import LocalGroup
from lockstep.sharding import buckets
from lockstep.sharding.parameter_shards import LocalGradients, parameter_shards
from lockstep.sharding.replicas import EarlySums

CPU = torch.device("cpu")


class Twins(LocalGroup):
    """An axis of two ranks with the same gradients.

    Attributes:
        messages: for each, its elements, and whether the first layer had no gradient yet.
        unfinished: most messages that were on their way at once.
    """

    size = 2

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._under_way = 0
        self.unfinished = 0
        self.messages: list[tuple[int, bool]] = []

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.messages.append((tensor.numel(), self._model[0].weight.grad is None))  # type: ignore[index]
        self._under_way += 1
        self.unfinished = max(self.unfinished, self._under_way)

        def finish() -> Tensor:
            self._under_way -= 1
            return tensor * 2

        return finish


def layers(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(number)))


def test_buckets_are_sent_in_the_last_backward_as_soon_as_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_BUCKET", 2 * 16 * 4)
    model, alone = layers(6), layers(6)
    axis = Twins(model)
    shards = parameter_shards(model)
    gradients = LocalGradients(shards)
    sums = EarlySums(shards[::-1], axis, CPU)
    for last in (False, True):
        sums.begin(last)
        gradients.clear()
        model(torch.ones(2, 4)).sum().backward()
        alone(torch.ones(2, 4)).sum().backward()
        assert len(axis.messages) == (3 if last else 0)
    names = sums.finish()
    assert axis.messages == [(32, False)] * 3
    assert axis.unfinished == 2  # a copy of two buckets at most
    assert names == {shard.name for shard in shards}
    summed = gradients.read()
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(summed[name], 2 * parameter.grad)


def test_the_first_bucket_is_sent_before_the_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_BUCKET", 1)
    model = layers(3)
    axis = Twins(model)
    sums = EarlySums(parameter_shards(model)[::-1], axis, CPU)
    sums.begin(True)
    model(torch.ones(2, 4)).sum().backward()
    assert axis.messages == [(16, True), (16, True), (16, False)]


def test_what_the_last_backward_does_not_reach_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_BUCKET", 1)
    model = layers(4)
    axis = Twins(model)
    sums = EarlySums(parameter_shards(model)[::-1], axis, CPU)
    sums.begin(True)
    model[3](model[1](torch.ones(2, 4))).sum().backward()
    assert sums.finish() == {"3.weight"}  # buckets keep their order: that of 2.weight comes first
    sums.begin(True)
    model(torch.ones(2, 4)).sum().backward()
    assert len(sums.finish()) == 4
