"""What steps of several ranks pass to the optimizer: the gradient summed over ranks, divided by the divisor once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.failures import gives
from kit.small import in_group
from kit.worlds import in_world
from torch import Tensor, nn

from lockstep.config.schema import DDP
from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup, RankGroup
from lockstep.distributed.process_group import World
from lockstep.sharding.buckets import buckets
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.ddp import DDPStep

ONE = torch.tensor(1.0)


class Dividing:
    """An optimizer that records gradient / divisor."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.divided: list[list[float]] = []

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        assert self._parameter.grad is not None
        self.divided.append((self._parameter.grad / divisor).flatten().tolist())
        self._parameter.grad = None


def squared_norm(tensors: Any) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def ddp_context(model: nn.Module, options: DDP, world: World, micro_batches: int) -> Any:
    """Return what `DDPStep` reads of a `ShardingContext`."""
    config = SimpleNamespace(parallel=SimpleNamespace(ddp=options), precision=SimpleNamespace(parameters="fp32"))
    plan = SimpleNamespace(batch=SimpleNamespace(accumulation=micro_batches))
    facts = {"config": config, "plan": plan, "squared_norm": squared_norm, "has_values": True}
    return SimpleNamespace(model=model, world=world, **facts)


def ddp_update(micro_batches: int, divisor: float) -> dict[str, Any]:
    """Make an update in which rank r's micro-batch i has the gradient 10 r + i + 1."""
    with in_group():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = nn.Linear(1, 1, bias=False)
        optimizer: Any = Dividing(model.weight)
        world = World(RankGroup(dist.group.WORLD), rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
        step = DDPStep(ddp_context(model, DDP(), world, micro_batches), optimizer, SyncedBuffers(model))
        for index in range(micro_batches):
            with step.sync_context(index == micro_batches - 1):
                step.backward(step.module(torch.tensor([[10.0 * rank + index + 1]])).sum(), ONE)
        gradients = {name: gradient.flatten().tolist() for name, gradient in step.gradients()}
        norm = float(step.squared_norm())
        step.update(0.1, divisor, True)
        step.close()
        return {"gradients": gradients, "norm": norm, "divided": optimizer.divided}


@pytest.mark.parametrize(("micro_batches", "total"), [(1, 1.0 + 11), (2, 1.0 + 2 + 11 + 12)])
def test_ddp_s_mean_over_ranks_becomes_a_sum_in_gradients_norm_and_update(micro_batches: int, total: float) -> None:
    for update in in_world(2, ddp_update, micro_batches, 4.0):
        assert update == {"gradients": {"weight": [total]}, "norm": total**2, "divided": [[total / 4]]}


def places_of_gradients(options: DDP) -> list[set[tuple[int, ...]]]:
    """Return, for each update, where the gradients have been after each of its micro-batches."""
    with in_group():
        rank = dist.get_rank()
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = NoOptimizer(model)
        world = World(RankGroup(dist.group.WORLD), rank, 2, rank, 2, torch.device("cpu"), "gloo")
        step = DDPStep(ddp_context(model, options, world, 3), optimizer, SyncedBuffers(model))  # type: ignore[arg-type]
        places = []
        for _ in range(3):
            place = set()
            for index in range(3):
                with step.sync_context(index == 2):
                    step.backward(step.module(torch.ones(2, 4)).sum(), ONE)
                place.add(
                    tuple(parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None)
                )
            places.append(place)
            step.update(0.1, 1.0, True)
        step.close()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())  # type: ignore[attr-defined]
        return places


class NoOptimizer:
    """Clears gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None


@pytest.mark.parametrize("options", [DDP(), DDP(find_unused_parameters=True), DDP(static_graph=True)])
def test_ddp_accumulates_gradients_where_it_reduces_them(options: DDP) -> None:
    for places in in_world(2, places_of_gradients, options):
        first, *later = places
        assert options.static_graph or len(first) == 1
        assert all(len(place) == 1 for place in later)


def leaving_a_layer_out() -> str:
    with in_group():
        rank = dist.get_rank()
        model = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        world = World(RankGroup(dist.group.WORLD), rank, 2, rank, 2, torch.device("cpu"), "gloo")
        model.forward = lambda layers: sum(model[layer](torch.ones(1, 1)) for layer in layers)  # type: ignore[method-assign]
        optimizer: Any = Dividing(model[0].weight)
        step = DDPStep(ddp_context(model, DDP(), world, 2), optimizer, SyncedBuffers(model))
        with pytest.raises(ConfigError) as refusal, step.sync_context(True):
            step.backward(step.module([0]).sum(), ONE)
        return str(refusal.value)


def test_ddp_names_the_parameters_whose_reduction_others_wait_for() -> None:
    for rank, message in enumerate(in_world(2, leaving_a_layer_out)):
        assert message.startswith("model: 1.weight, 1.bias: ")
        assert gives(message, "last micro-batch", f"rank {rank}")


def test_buckets_have_one_dtype_a_limit_and_the_order_of_the_gradients() -> None:
    mib = 2**20
    sizes = [10 * mib, 10 * mib, 10 * mib, 30 * mib, 1]
    gradients = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    wide = torch.empty(1, dtype=torch.float64, device="meta")
    sizes = [[item.nbytes for item in bucket] for bucket in buckets([gradients[0], wide, *gradients[1:]])]
    assert sizes == [[10 * mib, 10 * mib], [10 * mib], [30 * mib], [1], [8]]


def buffers_after_forwards() -> list[list[float]]:
    """Return this rank's mean in two updates of two micro-batches, each of which adds its rank + 1 to it."""
    with in_group():
        model = nn.Module()
        model.mean = nn.Buffer(torch.full((1,), 100.0 * dist.get_rank()))
        model.table = nn.Buffer(torch.full((1,), float(dist.get_rank())), persistent=False)
        buffers = SyncedBuffers(model)
        means = []
        for _ in range(2):
            for last in (False, True):
                buffers.before_forward(last)
                model.mean += dist.get_rank() + 1
                means.append(float(model.mean))
        return [means, model.table.tolist()]


def test_forwards_of_an_update_start_from_the_first_rank_s_buffers_once() -> None:
    assert in_world(2, buffers_after_forwards) == [[[1, 2, 3, 4], [0]], [[2, 4, 4, 6], [1]]]


def test_a_model_without_saved_buffers_needs_no_group() -> None:
    buffers = SyncedBuffers(nn.Linear(2, 2))
    buffers.before_forward(last=True)
    assert not buffers
    assert LocalGroup().size == 1
