"""Where a model is partitioned, and what its stages compute, without a pipeline schedule."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.failures import fails
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.engine.partitioning import PartitionSpec, check_partition, first_blocks
from lockstep.engine.placeholders import outer_modules
from lockstep.engine.stages import PartitionedModel
from lockstep.engine.usage import sides_of_use
from lockstep.models.blocks import blocks_in_line, repeated_blocks
from lockstep.resilience.number_faults import make_nan

CPU = torch.device("cpu")
GIVEN = (torch.randint(16, (2, 6)),)
INPUTS = {"tokens": torch.randint(16, (2, 6))}


class Chain(nn.Module):
    """Defines its last norm before its blocks, and may tie its head to its table."""

    def __init__(self, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def spec(rank: int, ranks: int = 2, stages_per_rank: int = 1, split: Any = None, schedule: Any = "1f1b") -> Any:
    return PartitionSpec(rank, ranks, schedule, stages_per_rank, split)


def names(model: nn.Module) -> list[str]:
    return [f"blocks.{index}" for index in range(len(model.blocks))]


def partitioned(rank: int, tied: bool = False, **how: Any) -> PartitionedModel:
    torch.manual_seed(0)
    model = Chain(tied=tied)
    return PartitionedModel(model, names(model), spec(rank, **how), CPU, INPUTS, nullcontext, ForwardMode())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", [{}, {"stages_per_rank": 2, "schedule": "interleaved-1f1b"}, {"split": ["blocks.3"]}])
def test_stages_one_after_the_other_are_the_model(how: dict[str, Any], tied: bool) -> None:
    torch.manual_seed(0)
    whole = Chain(tied=tied)
    expected = whole(**INPUTS)
    expected.square().sum().backward()
    ranks = [partitioned(rank, tied, **how) for rank in range(2)]
    activation: Any = None
    for stage, rank in enumerate(ranks[0].owners):
        received = ranks[rank].activation_specs(INPUTS)[stage]
        assert stage == 0 or (received.shape, received.dtype) == (tuple(activation.shape), activation.dtype)
        activation = ranks[rank].run(stage, activation, INPUTS)
    torch.testing.assert_close(activation, expected, rtol=0, atol=0)
    activation.square().sum().backward()
    gradients: dict[str, Tensor] = {}
    for rank in ranks:
        for name, parameter in rank.model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_each_parameter_belongs_to_one_stage_unless_it_is_tied() -> None:
    for tied in (False, True):
        ranks = [partitioned(rank, tied) for rank in range(2)]
        held = [{name for name, _ in rank.model.named_parameters()} for rank in ranks]
        assert held[0] | held[1] == {name for name, _ in Chain(tied=tied).named_parameters()}
        assert held[0] & held[1] == ({"table.weight"} if tied else set())
        assert ranks[0].shared == (["table.weight"] if tied else [])


@pytest.mark.parametrize("tied", [False, True])
def test_a_nan_that_is_planted_where_a_rank_begins_reaches_its_output(tied: bool) -> None:
    """A later stage calls a table that is tied to its head, and uses no row of it."""
    activation: Any = None
    for rank in range(2):
        stages = partitioned(rank, tied)
        make_nan(stages.first_module, fired := Mock())
        output = stages.run(rank, activation, INPUTS)
        fired.assert_called_once()
        assert output.isnan().all()
        activation = torch.zeros_like(output)


def test_a_stage_has_the_parameters_of_its_blocks_and_the_ends_those_outside_of_blocks() -> None:
    for rank, outside in enumerate((["table.weight"], ["norm.weight", "norm.bias", "head.weight"])):
        stages = partitioned(rank, stages_per_rank=2, schedule="interleaved-1f1b")
        named = {id(parameter): name for name, parameter in stages.model.named_parameters()}
        for stage in stages.own:
            expected = {name for name in named.values() if name.startswith(f"blocks.{stage}.")}
            if stage in (0, stages.count - 1):
                expected |= set(outside)
            assert {named[id(parameter)] for parameter in stages.parameters_of(stage)} == expected


def test_the_side_of_weights_is_where_they_are_used_not_where_they_are_defined() -> None:
    model = Chain()
    used = sides_of_use(model, names(model), INPUTS).sides
    assert (used["table.weight"], used["norm.weight"], used["head.weight"]) == ("before", "after", "after")
    sides = {name: side for name, _, side in outer_modules(model, names(model), used)}
    assert (sides["table"], sides["norm"], sides["head"]) == ("before", "after", "after")


def test_the_last_stage_has_fewer_blocks_because_it_has_the_head() -> None:
    model = Chain(blocks=6)  # a head of 128 weights weighs as much as two blocks of 72
    used = sides_of_use(model, names(model), INPUTS).sides
    assert first_blocks(model, names(model), spec(0, ranks=3), outer_modules(model, names(model), used)) == [0, 2, 5]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ranks": 5}, "5 stages, but Chain has 4 blocks"),
        ({"split": ["blocks.9"]}, "name the first block of each of the 2 stages"),
        ({"split": ["blocks.1", "blocks.2"]}, "name the first block of each of the 2 stages"),
        ({"split": ["blocks.0"]}, "name the first block of each of the 2 stages"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(how: dict[str, Any], message: str) -> None:
    model = Chain()
    with pytest.raises(ConfigError, match=message):
        check_partition(model, names(model), spec(0, **how))


class Skipping(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class AfterTheTable(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + first)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Skipping, "computes something between blocks"), (AfterTheTable, "of table.weight before the")],
)
def test_blocks_that_form_no_chain_are_refused_on_every_rank(kind: type[Chain], message: str) -> None:
    for rank in range(2):
        model = kind()
        stages = PartitionedModel(model, names(model), spec(rank), CPU, INPUTS, nullcontext, ForwardMode())
        with pytest.raises(ConfigError, match=message):
            stages.activation_specs(INPUTS)


class Mixer(nn.Module):
    """Takes a mask [B, T] and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor]:
        return (hidden * mask[:, :, None] * self.scale,)


class Attention(nn.Module):
    """Takes a mask [B, T, T] and returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + mask @ self.values(hidden)


class Hybrid(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixer(), Mixer(), Attention(), Attention()])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, mask = self.table(tokens), tokens.gt(3).float()
        for block in self.blocks:
            if isinstance(block, Attention):
                hidden = block(hidden, mask[:, :, None] * mask[:, None])
            else:
                hidden = block(hidden, mask)[0]
        return self.head(self.norm(hidden))


class Nested(nn.Module):
    """Has layers of several shapes in a Sequential, which isn't all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.pipe = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.pipe(self.table(tokens)).tanh())


class Derived(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(16, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


@pytest.mark.parametrize("kind", [Hybrid, Nested, Derived])
def test_blocks_of_several_kinds_and_layers_of_a_sequential_are_stages(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    whole = kind()
    ranks = []
    for rank in range(2):
        torch.manual_seed(0)
        model = kind()
        chain = blocks_in_line(model, repeated_blocks(model))
        ranks.append(PartitionedModel(model, chain, spec(rank), CPU, GIVEN, nullcontext, ForwardMode()))
    activation: Any = None
    for stage, rank in enumerate(ranks):
        received = rank.activation_specs(GIVEN)[stage]
        assert stage == 0 or received.shape == activation.shape
        activation = rank.run(stage, activation, GIVEN)
    torch.testing.assert_close(activation, whole(*GIVEN), rtol=0, atol=0)


def test_a_layer_that_a_sequential_calls_twice_is_refused() -> None:
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Embedding(16, 8), tanh, nn.Linear(8, 8), tanh, nn.Linear(8, 4))
    with fails(ConfigError, "modules twice"):
        check_partition(model, blocks_in_line(model, repeated_blocks(model)), spec(0))


def test_a_stage_boundary_of_another_shape_is_refused_on_every_rank() -> None:
    for rank in range(2):
        model = Chain()
        model.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 8)])
        with fails(ConfigError, "one shape"):
            PartitionedModel(
                model, names(model), spec(rank, split=["blocks.2"]), CPU, INPUTS, nullcontext, ForwardMode()
            )
