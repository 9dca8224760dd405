"""Blocks that keep something from one forward to the next: a second forward would change the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from transforms.test_recomputing import MODES

import lockstep


class Block(nn.Module):
    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class RunningMean(Block):
    """Subtracts a running mean from its inputs, which the forward changes at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x - self.mean)
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return output


class PlainMean(Block):
    """Keeps a mean that is no buffer, and that it doesn't use."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


def test_a_compiled_model_is_compiled_for_its_first_forwards_alone() -> None:
    model = nn.Sequential(*(Block() for _ in range(2)))
    lockstep.checkpoint_activations(model, [Block])
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    counts = []
    for _ in range(6):
        compiled(torch.ones(2, 4)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[3:] == [counts[2]] * 3


class Counter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Collector(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.layer(x.clone())))


class Cache(Block):
    """Keeps tensors that each forward makes again, or the first one makes."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__(layer)
        self.last: Tensor | None = None
        self.register_buffer("table", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(float(x.shape[0]))[:, None]
        self.last = super().forward(nn.functional.dropout(x, 0.2)) + self.table
        return self.last


class Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], number: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Repeated(Chain):
    """One block, called three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x)


def trained(model: nn.Module, updates: int = 3) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        model(torch.randn(8, 4, generator=draws)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def of(normed: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Block(normed(nn.Linear(4, 4)))


STATEFUL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a running mean": (RunningMean, r"mean .*changes with each forward"),
    "one that is no buffer": (PlainMean, r"mean .*changes with each forward"),
    "spectral norm": (of(parametrizations.spectral_norm), "layer.parametrizations.weight.0._u"),
    "spectral norm, by hooks": (of(spectral_norm), "layer.weight_u"),
    "a counter": (Counter, r"calls .*changes with each forward"),
    "a list that grows": (Collector, r"seen .*changes with each forward"),
    "its own input": (InPlace, "writes to its input in place"),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_block_that_keeps_state_is_refused(name: str) -> None:
    make, message = STATEFUL[name]
    for options in MODES.values():
        model = Chain(make)
        lockstep.checkpoint_activations(model, **options)
        with pytest.raises(lockstep.ConfigError, match=message) as refused:
            trained(model, 1)
        assert str(refused.value).startswith("memory.activation_checkpointing: blocks.")


@pytest.mark.parametrize("block", [Cache, of(weight_norm), of(parametrizations.weight_norm)])
@pytest.mark.parametrize("chain", [Chain, Repeated])
def test_tensors_that_each_forward_makes_again_are_no_state(chain: type[Chain], block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    state = chain(block).state_dict()
    results = []
    for options in ({}, *MODES.values()):
        model = chain(block)
        model.load_state_dict(state)
        if options or results:
            lockstep.checkpoint_activations(model, **options)
        results.append(trained(model))
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))


def test_a_run_is_refused_in_its_first_update() -> None:
    options: dict[str, Any] = {"memory": {"activation_checkpointing": {"mode": "full"}}}
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(0, 4, (12,)))
    sections = {
        "objective": {"kind": "classification"},
        "batch": {"global_size": 4},
        "run": {"steps": 2},
        "precision": {"compute": "fp32"},
    }
    with (
        pytest.raises(lockstep.ConfigError, match=r"blocks\.3\.mean .*changes"),
        lockstep.session(
            {**options, **sections, "launch": {"device": "cpu"}}, model=Chain(RunningMean), train_dataset=data
        ) as session,
    ):
        list(session)
