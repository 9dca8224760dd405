"""A rank on the simulated accelerator: what it computes, what it finds.

small tensors have values, large ones shapes; a wrong device, a host sync and a collective's tensor on the CPU are found
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.distributed as dist
from kit import small
from torch import nn

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.core.records import Batch
from lockstep.simulation.groups import WrongDevice
from lockstep.simulation.ranks import SimulatedRank, simulated_rank
from lockstep.simulation.sessions import simulated_session
from lockstep.training.assemble import assemble

DEVICE = "simulated:0"


def update(rank: SimulatedRank, updates: int = 6, **objects: object) -> list[str]:
    """Run updates of the smallest net; return the host's waits of the last one."""
    config = small.config(
        launch={"device": "auto"}, batch={"global_size": 16, "micro_size": 2}, parallel={"strategy": "fsdp"}
    )
    session = assemble(Config.model_validate(config), rank.world, UserObjects(**objects))  # type: ignore[arg-type]
    for batch in session.batches():
        rank.execution.syncs.clear()
        session.accumulate(batch)
        session.commit()
        if session.progress.steps == updates:
            break
    session.close()
    return [str(sync) for sync in rank.execution.syncs]


def test_small_tensors_have_values_and_large_ones_shapes() -> None:
    with simulated_rank(0, 1):
        points = torch.tensor([1.0, 2.0, 4.0]).to(DEVICE)
        assert (points * 2).sum().item() == 14
        points[1:].mul_(10)
        assert points.tolist() == [1, 20, 40]
        matrix = torch.ones(1000, 1000, device=DEVICE)
        assert (matrix @ matrix).shape == (1000, 1000)
        assert torch.empty(4, device="cpu").fill_(3).sum() == 12


def test_torchs_current_stream_waits_for_events_of_the_device() -> None:
    """FSDP waits so for a gather that no block has used, as in a stage of several blocks."""
    with simulated_rank(0, 1):
        event = torch.get_device_module("simulated").Stream().record_event()
        torch.accelerator.current_stream().wait_event(event)


def _raise(*unused: object) -> torch.Tensor:
    raise LookupError("in a hook")


def test_an_error_in_a_backward_is_raised() -> None:
    """It would end the process: torch asks Python for the device while the error is pending."""
    with simulated_rank(0, 1):
        weight = torch.ones(8, 8, device=DEVICE, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, _raise):
            loss = weight.exp().sum()
        for _ in range(2):
            with pytest.raises(LookupError, match="in a hook"):
                loss.backward()
        doubled = weight * 2
        doubled.register_hook(lambda gradient: gradient + torch.ones(8, 8))
        with pytest.raises(RuntimeError, match="same device"):
            doubled.sum().backward()
        weight.sum().backward()
        assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shapes_and_dtypes_of_the_cpu(dtype: torch.dtype) -> None:
    def products(place: str) -> list[torch.Tensor]:
        rows, matrices = torch.ones(8, 16, dtype=dtype, device=place), torch.ones(2, 16, 32, dtype=dtype, device=place)
        rows.requires_grad_(), matrices.requires_grad_()
        ends = torch.tensor([3, 8], dtype=torch.int32, device=place)
        with torch.autocast(torch.device(place).type, dtype=torch.bfloat16):
            product = torch._grouped_mm(rows, matrices, ends)
        product.square().sum().backward()
        assert rows.grad is not None
        assert matrices.grad is not None
        return [product, rows.grad, matrices.grad]

    on_cpu = products("cpu")
    with simulated_rank(0, 1):
        simulated = products(DEVICE)
        assert [(each.shape, each.dtype) for each in simulated] == [(each.shape, each.dtype) for each in on_cpu]
        with pytest.raises(RuntimeError, match="16 bytes"):
            torch._grouped_mm(*(torch.ones(*shape, device=DEVICE) for shape in ((8, 5), (2, 5, 7))))


def test_autocast_casts_as_on_a_gpu() -> None:
    with simulated_rank(0, 1):
        layer, points = nn.Linear(64, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
        with torch.autocast("simulated", dtype=torch.bfloat16):
            product = layer(points)
            assert product.dtype == torch.bfloat16
            assert product.softmax(-1).dtype == torch.float32
            assert nn.functional.layer_norm(product, (64,)).dtype == torch.float32
        assert layer(points).dtype == torch.float32


def test_collectives_act_as_if_all_ranks_had_the_same() -> None:
    with simulated_rank(1, 4) as rank:
        number = torch.tensor([3.0]).to(DEVICE)
        dist.all_reduce(number)
        assert number.item() == 12
        parts = torch.zeros(4, device=DEVICE)
        dist.all_gather_single(parts, number)
        assert parts.tolist() == [12, 12, 12, 12]
        assert [collective.name for collective in rank.collectives] == ["all_reduce", "all_gather"]


def test_shared_parameters_stay_shared_when_they_move() -> None:
    with simulated_rank(0, 1):
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        layers[1].weight = layers[0].weight
        layers.to(DEVICE)
        assert layers[0].weight.device.type == "simulated"
        assert layers[0].weight is layers[1].weight


def test_an_update_runs_and_waits_only_for_the_report_of_the_one_before() -> None:
    with simulated_rank(0, 4) as rank:
        waits = update(rank)
        assert {collective.name for collective in rank.collectives} >= {"all_gather", "reduce_scatter", "all_reduce"}
    assert len(waits) == 1
    assert waits[0].startswith("Event.synchronize in readback.py:land")


class Reads(small.CrossEntropy):
    """Reads its loss on the host."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(outputs, batch)
        assert loss.item() < 1e9
        return loss


class OnHost(small.CrossEntropy):
    """Multiplies by a tensor on the CPU."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss_sum(outputs * torch.ones(1, 3), batch)


class Gathers(small.CrossEntropy):
    """Sends a tensor on the CPU through the device's group."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))
        return super().loss_sum(outputs, batch)


def test_a_host_sync_in_an_update_is_found() -> None:
    with simulated_rank(0, 4) as rank:
        waits = update(rank, objective=Reads())
    assert any(re.match(r"item in test_simulated_rank.py:\d+ \(Reads.loss_sum\) < ", wait) for wait in waits)


def test_a_tensor_on_another_device_is_found() -> None:
    with simulated_rank(0, 4) as rank, pytest.raises(RuntimeError, match="device"):
        update(rank, objective=OnHost())


def test_a_tensor_on_the_cpu_in_a_collective_is_found() -> None:
    with simulated_rank(0, 4) as rank, pytest.raises(WrongDevice, match="all_reduce of a group for simulated tensors"):
        update(rank, objective=Gathers())


def test_a_session_of_a_users_own_model() -> None:
    config = small.config(launch={"device": "auto"}, run={"steps": 6}, parallel={"strategy": "ddp"})
    del config["model"]
    excepthook = sys.excepthook
    with simulated_session(config, rank=1, ranks=2, model=small.Net()) as (session, rank):
        for batch in session.batches():
            rank.execution.syncs.clear()
            session.accumulate(batch)
            session.commit()
        assert session.progress.steps == 6
        assert len(rank.execution.syncs) == 1
        assert "all_reduce" in {collective.name for collective in rank.collectives}
        assert sys.excepthook is excepthook, "tracebacks have [rank1] before each line"


def test_tensors_of_subclasses_have_no_data_either() -> None:
    class Named(torch.Tensor):
        """A tensor of a user's class."""

    with simulated_rank(0, 1):
        tensor = torch.ones(2, 3, device=DEVICE).as_subclass(Named)
        assert isinstance(tensor, Named)
        assert tensor.device == torch.device(DEVICE)
