"""Offloaded activations come back bitwise identical; weights stay, each memory is copied once, and nothing waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import small
from torch import Tensor, nn

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.models.blocks import repeated_blocks
from lockstep.simulation.ranks import simulated_rank
from lockstep.training.assemble import assemble
from lockstep.transforms import activation_offload
from lockstep.transforms.activation_offload import ActivationsOnHost, OffloadActivations

POINTS = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.queries, self.keys = nn.Linear(32, 32), nn.Linear(32, 32)
        self.both = nn.Linear(32, 64)

    def forward(self, points: Tensor) -> Tensor:
        normed = self.norm(points)
        left, right = self.both(normed).chunk(2, -1)
        return points + torch.tanh(self.queries(normed)) * self.keys(normed).t().contiguous().t() + left * right.sin()


class Chain(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def gradients(net: nn.Module, points: Tensor, *, autocast: bool = False) -> list[Tensor | None]:
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        outputs = net(points)
    outputs.float().square().sum().backward()
    return [parameter.grad for parameter in net.parameters()]


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(
        torch.equal(one, other) if one is not None and other is not None else one is other
        for one, other in zip(left, right, strict=True)
    )


def offloading(net: nn.Module, least_bytes: int = 1) -> ActivationsOnHost:
    """Offload the net's activations; return what does it."""
    OffloadActivations(repeated_blocks).apply(net)
    (offload,) = [part for part in net.forward.args if isinstance(part, ActivationsOnHost)]  # type: ignore[attr-defined]
    offload._least_bytes = least_bytes
    return offload


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_the_same_and_only_activations_move(autocast: bool, frozen: bool) -> None:
    net = Chain()
    if frozen:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("queries" not in name)
    expected = gradients(copy.deepcopy(net), POINTS, autocast=autocast)
    sizes: list[tuple[int, ...]] = []
    offload = offloading(net)
    offload._on_host = _noting(offload._on_host, sizes)  # type: ignore[method-assign]
    for _ in range(2):
        assert same(gradients(net, POINTS, autocast=autocast), expected)
    assert sizes
    assert all(size[0] == 16 for size in sizes), f"weights have no dim of 16: {sizes}"


def _noting(call: Callable[..., Any], sizes: list[tuple[int, ...]]) -> Callable[..., Any]:
    def noted(tensor: Tensor, storage: torch.UntypedStorage) -> Any:
        sizes.append(tuple(tensor.shape) if tensor.shape[0] == 16 else tuple(reversed(tensor.shape)))
        return call(tensor, storage)

    return noted


def test_what_several_operations_save_is_copied_once_and_the_last_block_keeps_its_own() -> None:
    moved = []
    for blocks in (3, 4, 5):
        net = Chain(blocks)
        offload = offloading(net)
        gradients(net, POINTS)
        moved.append(offload.bytes)
    per_block = moved[1] - moved[0]
    assert moved[2] - moved[1] == per_block
    assert moved[0] == 2 * per_block + POINTS.nbytes
    # points, normed, both (as two views), tanh, the product of keys, sin: no operation's input is there twice
    assert per_block <= 8 * POINTS.nbytes


def test_small_tensors_stay() -> None:
    net = Chain()
    offload = offloading(net, least_bytes=POINTS.nbytes + 1)
    gradients(net, POINTS)
    assert 0 < offload.bytes < 10 * POINTS.nbytes, "only `both`, which is twice as large"
    offload = offloading(Chain(), least_bytes=10**6)
    assert offload.bytes == 0


def test_a_tensor_that_was_changed_in_place_is_copied_again() -> None:
    weight = torch.ones(16, 32, requires_grad=True)
    with ActivationsOnHost(least_bytes=1) as _:
        points = torch.full((16, 32), 2.0)
        first = weight * points
        later = points.clone().add_(1.0)
        second = first * later
    second.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((16, 32), 6.0))


def test_a_graph_can_be_walked_twice() -> None:
    net = Chain()
    offloading(net)
    loss = net(POINTS).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * grad) for parameter, grad in zip(net.parameters(), once, strict=True))  # type: ignore[arg-type]


def test_micro_batches_in_flight_keep_their_own() -> None:
    net = Chain()
    expected = gradients(copy.deepcopy(net), POINTS)
    offloading(net)
    net.zero_grad()
    losses = [net(points).square().sum() for points in (POINTS, 2 * POINTS)]
    losses[0].backward()
    assert same([parameter.grad for parameter in net.parameters()], expected)
    losses[1].backward()


@pytest.mark.parametrize("strategy", ["single"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_an_update_on_an_accelerator_offloads_without_a_wait(
    strategy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ActivationsOnHost] = []
    monkeypatch.setattr(activation_offload, "ActivationsOnHost", _small(made))
    parallel = {"strategy": strategy}
    memory = {"activation_offload": "cpu", "activation_checkpointing": {"mode": mode}}
    train = {"kind": "stdlib-text", "length": 16}
    sections: dict[str, Any] = {
        "model": {"kind": "transformer", "width": 32, "layers": 3, "heads": 2},
        "objective": {"kind": "next-token"},
        "data": {"train": train},
    }
    config = small.config() | dict(
        sections,
        launch={"device": "auto"},
        batch={"global_size": 8, "micro_size": 2},
        parallel=parallel,
        memory=memory,
        run={"steps": 6, "allow_untested": True},
    )
    with simulated_rank(0, 1 if strategy == "single" else 2) as rank:
        session = assemble(Config.model_validate(config), rank.world, UserObjects())
        for batch in session.batches():
            rank.execution.syncs.clear()
            session.accumulate(batch)
            session.commit()
        session.close()
        waits = [str(sync) for sync in rank.execution.syncs]
    assert made[0].bytes > 0
    assert [wait for wait in waits if "readback" not in wait] == []


def _small(made: list[ActivationsOnHost]) -> Callable[[Any], ActivationsOnHost]:
    def make(shapes: Any) -> ActivationsOnHost:
        made.append(ActivationsOnHost(shapes, least_bytes=1))
        return made[-1]

    return make
