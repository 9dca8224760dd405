"""Model and optimizer state by the names of parameters, and the shards of it that a rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.failures import fails
from kit.small import in_group
from kit.worlds import in_world
from torch import Tensor, nn

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.protocols import Optimizer
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import FlatShard, full_tensor, shard_of
from lockstep.models.weight_files import Weights
from lockstep.models.weight_matching import match_weights
from lockstep.sharding.buffers import BufferSnapshot
from lockstep.sharding.deepspeed_shards import ZeroShard
from lockstep.sharding.fsdp import units
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.parameter_shards import parameter_shards
from lockstep.sharding.single import unused_parameters


class Momentum(Optimizer):
    """An optimizer with a state."""

    def __init__(self, model: nn.Module) -> None:
        self.entries: dict[str, Any] = {
            name: {"momentum": torch.full_like(parameter, 2.0), "step": 3}
            for name, parameter in model.named_parameters()
        }

    def state_dict(self) -> dict[str, Any]:
        return {"parameters": self.entries, "groups": [{"lr_scale": 1.0}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state["parameters"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.table.weight
        self.mean = nn.Buffer(torch.ones(2))
        self.scratch = nn.Buffer(torch.ones(2), persistent=False)


def test_a_state_names_each_tensor_once_and_restores_it() -> None:
    model = Tied()
    optimizer: Any = Momentum(model)
    state = ModelState(model, optimizer)
    live = state.live_state()
    assert set(live.tensors) == {"model.table.weight", "model.mean", "optimizer.momentum.table.weight"}
    assert live.values["tied"] == {"head.weight": "table.weight"}
    assert live.values["optimizer"] == {"table.weight": {"step": 3}}
    assert live.changes_in_forward == {"model.mean"}
    saved = TrainingState({name: tensor.detach().clone() + 1 for name, tensor in live.tensors.items()}, live.values)
    before = model.table.weight.detach().clone()
    state.restore(saved)
    assert torch.equal(model.table.weight, before + 1)
    assert optimizer.entries["table.weight"]["step"] == 3
    assert torch.equal(optimizer.entries["table.weight"]["momentum"], torch.full((4, 3), 3.0))
    assert [name for name, _ in state.weights()] == ["mean", "table.weight"]


def test_tensors_outside_of_an_optimizers_entries_are_refused_with_the_place_for_them() -> None:
    model = Tied()
    optimizer: Any = Momentum(model)
    optimizer.entries["table.weight"]["history"] = [torch.ones(4, 3)]
    with fails(RunFailed, "history", "table.weight"):
        ModelState(model, optimizer).live_state()


class Counts(nn.Linear):
    """Makes a tensor of its number of forwards whenever its state is asked for."""

    forwards = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.forwards)

    def set_extra_state(self, state: Tensor) -> None:
        self.forwards = int(state)


def test_a_module_is_given_the_state_that_it_makes_itself() -> None:
    first, second, third = (nn.Sequential(Counts(1, 1), Counts(1, 1)) for _ in range(3))
    first[1].forwards = 7
    saved = ModelState(first, Momentum(first)).live_state()  # type: ignore[arg-type]
    ModelState(second, Momentum(second)).restore(saved)  # type: ignore[arg-type]
    match_weights(third, Weights(Path("run"), dict(first.state_dict()))).put(third)
    assert [(model[0].forwards, model[1].forwards) for model in (second, third)] == [(0, 7)] * 2


def test_a_buffer_that_grows_is_refused_at_the_first_save() -> None:
    model = Tied()
    state = ModelState(model, Momentum(model))  # type: ignore[arg-type]
    model.mean = torch.zeros(7)
    with fails(ConfigError, "buffer mean", key="model"):
        state.live_state()


def test_a_buffer_has_the_dtype_that_a_forward_has_given_it() -> None:
    third = torch.full((2,), 1 / 3, dtype=torch.float64)
    first, second = Tied(), Tied()
    state = ModelState(first, Momentum(first))  # type: ignore[arg-type]
    before = state.live_state()
    assert "recast" not in before.values
    first.mean = third
    live = state.live_state()
    assert live.values["recast"] == ["mean"]
    ModelState(second, Momentum(second)).restore(live)  # type: ignore[arg-type]
    assert second.mean.dtype == torch.float64
    assert torch.equal(second.mean, third)
    state.restore(before)
    assert first.mean.dtype == torch.float32


def test_a_buffer_of_another_precision_takes_the_values() -> None:
    first, second = Tied(), Tied()
    second.mean = torch.zeros(2, dtype=torch.float64)
    saved = ModelState(second, Momentum(second)).live_state()  # type: ignore[arg-type]
    ModelState(first, Momentum(first)).restore(saved)  # type: ignore[arg-type]
    assert first.mean.dtype == torch.float32
    assert first.mean.tolist() == [0, 0]


def test_another_models_state_is_refused() -> None:
    state = ModelState(Tied(), Momentum(Tied()))  # type: ignore[arg-type]
    live = state.live_state()
    with fails(RunFailed, "no mean"):
        state.restore(TrainingState({"model.table.weight": torch.ones(4, 3)}, live.values))
    with fails(RunFailed, "table.weight", "[4, 3]", "[3, 3]"):
        state.restore(TrainingState({**live.tensors, "model.table.weight": torch.ones(3, 3)}, live.values))


def test_a_zero_shard_is_a_range_of_the_whole_tensor() -> None:
    whole = torch.arange(12.0).view(3, 4)
    shard = ZeroShard(nn.Parameter(whole), FlatShard(torch.zeros(5), 3, whole.shape), 0, 2)
    assert shard.as_local("momentum", whole).tolist() == [3, 4, 5, 6, 7]
    assert shard.section(torch.arange(10.0)).tolist() == [2, 3, 4, 5, 6]
    assert isinstance(shard.as_shard("momentum", torch.ones(5)), FlatShard)
    assert shard.as_shard("momentum", torch.tensor(7.0)) == 7


def _shards() -> list[Any]:
    """Return the shards of a parameter whose rows are sharded unevenly over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with in_group():
        mesh = init_device_mesh("cpu", (2,))
        module = nn.Linear(2, 5, bias=False)
        values = torch.arange(10.0).view(5, 2)
        module.weight = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
        (shard,) = parameter_shards(module)
        moment = shard.as_shard("momentum", torch.ones_like(shard.local))
        flat: Tensor = full_tensor(FlatShard(torch.full((5,), 1.0 + dist.get_rank()), 5 * dist.get_rank(), (5, 2)))
        return [
            shard.as_local("momentum", values).tolist(),
            shard_of(module.weight, values).tolist(),
            tuple(moment.shape),
            full_tensor(shard.as_shard("momentum", shard.as_local("momentum", values))).tolist() == values.tolist(),
            flat.flatten().tolist(),
            float(shard.as_local("momentum", torch.tensor(4.0))),
        ]


def test_a_dtensor_s_shard_is_its_rows() -> None:
    first, second = in_world(2, _shards)
    assert first[:2] == [[[0, 1], [2, 3], [4, 5]]] * 2
    assert second[:2] == [[[6, 7], [8, 9]]] * 2
    assert first[2:] == second[2:] == [(5, 2), True, [1.0] * 5 + [2.0] * 5, 4.0]


def test_units_that_share_a_parameter_with_other_modules_are_merged_into_the_unit_around_them() -> None:
    from lockstep.config.schema import FSDP

    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3), "third": nn.Linear(3, 3)})
    model["third"].weight = model["first"].weight
    assert units(model, FSDP(wrap=("Linear",)), ()) == ["second"]
    with fails(ConfigError, "Liner", "Linear"):
        units(model, FSDP(wrap=("Liner",)), ())


def test_blocks_that_have_a_module_in_common_are_no_units() -> None:
    from lockstep.config.schema import FSDP

    shared = nn.Linear(3, 3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), inner) for inner in (shared, shared, nn.Linear(3, 3))))
    assert units(model, FSDP(wrap="blocks"), ["0", "1", "2"]) == ["2"]
    assert units(nn.Sequential(shared, shared), FSDP(wrap="blocks"), ["0", "1"]) == ["0"]


def test_a_snapshot_restores_buffers_that_forwards_have_changed() -> None:
    model = nn.BatchNorm1d(2)
    snapshot = BufferSnapshot(model)
    snapshot.take()
    model(torch.randn(4, 2))
    snapshot.put_back()
    assert snapshot.names == {"running_mean", "running_var", "num_batches_tracked"}
    assert model.running_mean.tolist() == [0.0, 0.0]


class Replaces(nn.Module):
    """Its forward replaces, makes, removes and resizes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(2))
        self.register_buffer("late", None)
        self.early = nn.Buffer(torch.ones(1))
        self.wider = nn.Buffer(torch.ones(1))
        self.shared = nn.Buffer(torch.ones(1).expand(3))

    def forward(self) -> None:
        self.mean = self.mean + 1
        self.late = torch.ones(3)
        self.early = None
        self.wider.resize_(4).zero_()
        self.shared = self.shared + 1


def test_a_snapshot_restores_buffers_that_forwards_have_replaced() -> None:
    model = Replaces()
    snapshot = BufferSnapshot(model)
    for _ in range(2):
        snapshot.take()
        model()
        snapshot.put_back()
        assert (model.mean.tolist(), model.late, model.early.tolist()) == ([0, 0], None, [1])
        assert (model.wider.tolist(), model.shared.tolist()) == ([1], [1, 1, 1])


class _Replaces(nn.BatchNorm1d):
    """Replaces buffers in its forward, one of them by a larger one."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("rows", torch.zeros(0, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        self.last = input[-1].clone()
        self.rows = torch.cat([self.rows, input])
        return super().forward(input)


@pytest.mark.parametrize("on_device", [False, True])
def test_buffers_are_put_back_unless_the_update_is_kept(on_device: bool) -> None:
    model = _Replaces()
    snapshot = BufferSnapshot(model)
    for keep in (True, False, False, True):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        snapshot.take()
        model(torch.full((3, 2), 1.0 if keep else torch.nan))
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        snapshot.put_back(unless=torch.tensor(keep) if on_device else keep)
        expected = after if keep else before
        for name, buffer in model.named_buffers():
            if name != "rows" or not on_device:
                assert torch.equal(buffer, expected[name]), name
    assert model.num_batches_tracked == 2


class Aliases(nn.Module):
    """Its forward puts views of a parameter where buffers were."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.before = nn.Buffer(torch.full((3,), 7.0))
        self.first = nn.Buffer(torch.full((3,), 8.0))

    def forward(self) -> None:
        self.before = self.weight.detach()
        self.first = self.weight.detach()[:1].expand(3)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_buffer_that_is_put_back_is_not_written_into_a_parameter(on_device: bool) -> None:
    model = Aliases()
    snapshot = BufferSnapshot(model)
    snapshot.take()
    model()
    snapshot.put_back(unless=torch.tensor(False) if on_device else False)
    assert model.weight.tolist() == [0, 0, 0]
    assert (model.before.tolist(), model.first.tolist()) == ([7, 7, 7], [8, 8, 8])


def test_a_buffer_that_is_too_large_to_be_copied_leaves_the_others() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("queue", torch.zeros(2**20))
    assert BufferSnapshot(model).names == {"running_mean", "running_var", "num_batches_tracked"}


def test_unused_parameters_are_named_with_the_remedy() -> None:
    message = str(unused_parameters([f"spare.{index}" for index in range(7)], remedy="leave x out and "))
    assert message.startswith("model: spare.0, spare.1, spare.2, spare.3, spare.4 and 2 more: ")
    assert message.endswith(" set parallel.ddp.find_unused_parameters: true")
    assert "leave x out" in message
