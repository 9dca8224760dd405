"""The invariant sum of gradients: bitwise identical on any number of ranks, over the terms that there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.failures import fails
from kit.small import in_group
from kit.worlds import in_world
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup, RankGroup
from lockstep.plan.batch import share_of
from lockstep.plan.summation import most_held
from lockstep.sharding import invariant
from lockstep.sharding.invariant import InvariantStep

TERMS = 5
ONE = torch.tensor(1.0)


class Recorded:
    """An optimizer that records the gradients of its updates."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.gradients: list[dict[str, Any]] = []

    def update(self, rate: float, divisor: Any, keep: Any) -> None:
        named = self._model.named_parameters()
        self.gradients.append({name: None if item.grad is None else item.grad.tolist() for name, item in named})


class Model(nn.Module):
    """A sum in which floating-point addition shows its order; `late` is used in term 4 alone, `unused` never."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 8))
        self.turned = nn.Parameter(torch.zeros(8, 5).t())
        self.late = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, term: int) -> Tensor:
        draws = torch.Generator().manual_seed(term)
        factors = torch.randn(2, 5, 8, generator=draws)
        loss = (self.weight * factors[0]).sum() + (self.turned * factors[1]).sum() + 0.1 * (term + 1)
        return loss + self.late.sum() if term == TERMS - 1 else loss


def step_of(model: nn.Module, optimizer: Any, axis: Any) -> InvariantStep:
    """Return a step that exchanges two elements for each rank at a time."""
    norm: Any = lambda tensors: sum(tensor.square().sum() for tensor in tensors)  # noqa: E731
    batch = SimpleNamespace(share=lambda samples, rank: share_of(samples, rank, axis.size))
    config = SimpleNamespace(parallel=SimpleNamespace(ddp=SimpleNamespace(bucket_mb=8 * axis.size / 2**20)))
    places = {"world": SimpleNamespace(axis=axis), "position": SimpleNamespace(share=axis.rank)}
    plan = SimpleNamespace(batch=batch)
    context: Any = SimpleNamespace(model=model, config=config, plan=plan, squared_norm=norm, **places)
    return InvariantStep(context, optimizer)


def make_updates(axis: Any, updates: int = 2) -> dict[str, Any]:
    """Make updates of `TERMS` micro-batches; each rank has as many, and the last of some is padding."""
    model = Model()
    optimizer = Recorded(model)
    step = step_of(model, optimizer, axis)
    most, share = -(-TERMS // axis.size), share_of(TERMS, axis.rank, axis.size)
    losses = []
    for _ in range(updates):
        step.begin_update(TERMS)
        for index in range(most):
            term = min(share.first + index, TERMS - 1)
            with step.sync_context(index == most - 1):
                step.backward(model(term), ONE)
        losses.append(float(step.loss_sum()))
        step.update(0.1, 1.0, True)
    return {"losses": losses, "gradients": optimizer.gradients}


def updates_on_this_rank() -> dict[str, Any]:
    with in_group():
        return make_updates(RankGroup(dist.group.WORLD))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_sum_is_bitwise_identical_on_any_number_of_ranks(ranks: int) -> None:
    alone = make_updates(LocalGroup())
    for updates in in_world(ranks, updates_on_this_rank):
        assert updates["losses"] == alone["losses"]
        assert updates["gradients"] == alone["gradients"]


def test_the_sum_adds_neighbors_first_and_not_one_after_the_other() -> None:
    terms = []
    for term in range(TERMS):
        model = Model()
        model(term).backward()
        terms.append(model.weight.grad)
    a, b, c, d, e = terms
    assert torch.tensor(make_updates(LocalGroup(), 1)["gradients"][0]["weight"]).equal(((a + b) + (c + d)) + e)
    assert not (((a + b) + (c + d)) + e).equal(a + b + c + d + e), "the terms don't show the order"


def test_a_parameter_without_gradient_in_all_terms_keeps_none_and_one_term_is_enough() -> None:
    for updates in in_world(2, updates_on_this_rank):
        for gradients in updates["gradients"]:
            assert (gradients["unused"], gradients["late"]) == (None, [1.0])


def buffers_made(updates: int) -> int:
    """Return how many flat gradients this rank's updates allocate."""
    made = []
    original = invariant._FlatGradient
    with pytest.MonkeyPatch.context() as patch, in_group():
        patch.setattr(invariant, "_FlatGradient", lambda *given: made.append(given) or original(*given))
        make_updates(RankGroup(dist.group.WORLD), updates)
    return len(made)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_memory_of_terms_is_used_again_in_the_next_update(ranks: int) -> None:
    shares = [share_of(TERMS, rank, ranks) for rank in range(ranks)]
    assert in_world(ranks, buffers_made, 3) == [most_held(share.first, share.stop, TERMS) for share in shares]


def test_gradients_have_the_strides_of_their_parameters() -> None:
    model = Model()
    step = step_of(model, Recorded(model), LocalGroup())
    step.begin_update(1)
    with step.sync_context(True):
        step.backward(model(0), ONE)
    assert model.turned.grad is not None
    assert model.turned.grad.stride() == model.turned.stride() == (1, 5)


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_forward_that_changes_a_buffer_is_refused(change: str) -> None:
    model = Model()
    model.mean = nn.Buffer(torch.zeros(2))
    step = step_of(model, Recorded(model), LocalGroup())
    step.begin_update(1)
    changes = {"in place": lambda: model.mean.add_(1), "replaced": lambda: setattr(model, "mean", torch.zeros(2))}
    refused = fails(ConfigError, "changes mean")
    with refused, step.sync_context(True):
        changes[change]()


def test_other_precisions_than_fp32_are_refused_if_they_are_trained() -> None:
    model = Model()
    model.frozen = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
    step_of(model, Recorded(model), LocalGroup())
    model.frozen.requires_grad_(True)
    with fails(ConfigError, "fp32", "frozen", "float64"):
        step_of(model, Recorded(model), LocalGroup())
