"""Parameters at rest in bf16: unbiased rounding, bitwise alike whatever the shards, losses beside those of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.failures import fails
from kit.runs import recorded, state_after
from torch import Tensor, nn
from training.test_same_run import config

from lockstep.assembly.planning import plan_run
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.shard_boxes import RowShards
from lockstep.optim.rounded import RoundedAdam, stochastically_rounded

BF16 = {"precision": {"parameters": "bf16"}}
SHAPES = {"matrix": (7, 6), "vector": (5,), "cube": (2, 3, 4), "column": (1, 6)}


def test_rounding_is_unbiased_and_keeps_what_bf16_has() -> None:
    value = torch.tensor([1.0017, -3e-5, 7e8])
    noise = torch.arange(1 << 16, dtype=torch.int32)
    mean = torch.stack([stochastically_rounded(value, each).double() for each in noise]).mean(0)
    assert torch.allclose(mean, value.double(), rtol=1e-6)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(stochastically_rounded(exact.float(), noise[:1000]), exact)


class Place(LocalGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def stepped(parts: dict[str, Tensor], grads: list[dict[str, Tensor]], shards: RowShards | None = None) -> Any:
    """The parameters and moments after the steps."""
    named = {name: nn.Parameter(tensor.clone()) for name, tensor in parts.items()}
    group = {"names": [*named], "params": [*named.values()], "lr": 1e-2, "lr_scale": 1.0, "weight_decay": 0.1}
    adam = RoundedAdam([group], (0.9, 0.95), 1e-8, decoupled=True, seed=3, shards=shards)
    for gradients in grads:
        for name, gradient in gradients.items():
            named[name].grad = gradient.clone()
        adam.update(1e-2, 2.0, True)
    states: Any = adam.state_dict()["parameters"]
    assert {float(state["step"]) for state in states.values()} == {len(grads)}, "a rank without elements counts, too"
    return {name: [named[name].detach(), states[name]["exp_avg"], states[name]["exp_avg_sq"]] for name in named}


def part(tensor: Tensor, rank: int, size: int) -> Tensor:
    """FSDP's part; the matrix with one row is divided along its other dim."""
    dim = 1 if tensor.shape[0] == 1 else 0
    parts = tensor.chunk(size, dim)
    return parts[rank].contiguous() if rank < len(parts) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_get_the_bits_of_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    grads = [{name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()} for _ in range(3)]
    expected = stepped(whole, grads)
    monkeypatch.setattr("lockstep.optim.rounded._CHUNK", 6)  # several chunks
    for rank in range(size):
        shards = RowShards(Place(rank, size), SHAPES)
        own = {name: part(tensor, rank, size) for name, tensor in whole.items()}
        steps = [{name: part(tensor, rank, size) for name, tensor in gradients.items()} for gradients in grads]
        found = stepped(own, steps, shards)
        for name, tensors in expected.items():
            assert all(map(torch.equal, found[name], [part(each, rank, size) for each in tensors])), name
    other = stepped(whole, grads[:2])
    assert not torch.equal(other["matrix"][0], expected["matrix"][0])


def test_losses_beside_those_of_fp32() -> None:
    """A rate at which the nearest bf16 number would lose nearly every step."""
    optim = {"optim": {"name": "adamw", "lr": 3e-4}, "schedule": {"kind": "constant"}, "run": {"steps": 60}}
    plain = recorded(config(20, **optim, precision={"compute": "bf16"}), updates=60)
    narrow = recorded(config(20, **optim, **BF16), updates=60)
    assert plain.losses[0] - plain.losses[-1] > 0.05
    assert narrow.losses == pytest.approx(plain.losses, rel=5e-3)


def test_a_resume_is_bitwise_equal_and_state_is_in_bf16(tmp_path: Path) -> None:
    settings = config(12, **BF16)
    whole = state_after(settings, tmp_path / "whole", 5)
    state_after(settings, tmp_path / "parts", 2)
    resumed = state_after(settings, tmp_path / "parts", 5)
    assert resumed.pop("values") == whole.pop("values")
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    assert {tensor.dtype for key, tensor in whole.items() if ".step." not in key} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"precision": {"parameters": "bf16", "compute": "fp32"}}, "compute"),
        ({**BF16, "optim": {"name": "lion"}}, "lion"),
        ({**BF16, "optim": {"ema": {"decay": 0.9}}}, "away"),
    ],
)
def test_what_it_is_not_for_is_refused(sections: dict[str, Any], named: str) -> None:
    with fails(ConfigError, "bf16", named):
        validate({**config(12), **sections})


def test_the_plan_counts_2_bytes_a_parameter_2_a_gradient_4_of_moments() -> None:
    loaded = validate({**config(12), **BF16, "launch": {"device": "cpu", "ranks": 1}})
    plan = plan_run(loaded, None, trust_remote_code=False)
    row = next(row for row in plan.placements if row.strategy == "single")
    assert row.parameters == row.gradients == 2 * plan.parameters
    steps = 4 * sum(len(group.names) for group in plan.groups)
    assert row.optimizer == 4 * plan.parameters + steps
