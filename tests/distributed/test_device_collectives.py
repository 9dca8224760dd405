"""What reaches a collective is on the device of its group; objects are on the host."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import stand_in
from kit.worlds import in_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.config.schema import Launch
from lockstep.core.records import Tally
from lockstep.distributed import collectives, host_group
from lockstep.distributed.collectives import RankGroup, own_group
from lockstep.distributed.consensus import DeviceConsensus
from lockstep.distributed.host_group import pickled
from lockstep.distributed.process_group import device_refusal, joined
from lockstep.distributed.shard_boxes import full_tensor
from lockstep.optim.norms import squared_norm
from lockstep.simulation.groups import WrongDevice
from lockstep.simulation.ranks import simulated_rank


def _axis() -> RankGroup:
    assert dist.group.WORLD is not None
    return RankGroup(dist.group.WORLD)


def test_a_tensor_on_the_cpu_is_reduced_on_the_device_and_comes_back() -> None:
    with simulated_rank(0, 4) as rank:
        number = torch.tensor([3.0])
        with pytest.raises(WrongDevice):
            dist.all_reduce(number)
        axis = _axis()
        assert axis.sum(number) is number
        assert (number.device.type, number.item()) == ("cpu", 12)
        axis.copy_first(number)
        parts = torch.zeros(4)
        axis.concatenate(number, parts)
        assert parts.tolist() == [12.0] * 4
        rows = torch.ones(4, 1, 2)
        assert axis.start_all_to_all(rows.view(-1), [2] * 4, [2] * 4)().device.type == "simulated"
        assert collectives.maximum(number, dist.group.WORLD).item() == 12  # type: ignore[arg-type]
        names = [collective.name for collective in rank.collectives]
        assert names == ["all_reduce", "broadcast", "all_gather", "all_to_all", "all_reduce"]


def test_the_norm_of_no_gradient_and_of_offloaded_ones_is_on_the_device() -> None:
    with simulated_rank(0, 4) as rank:
        device = rank.world.device
        for gradients in ([], [torch.ones(3)], [torch.ones(3, device=device)]):
            norm = squared_norm(gradients, device)
            assert norm.device == device
            dist.all_reduce(norm)
            assert norm.item() == (12 if gradients else 0)


def test_a_vote_takes_numbers_from_the_host() -> None:
    with simulated_rank(0, 4) as rank:
        consensus = DeviceConsensus(rank.world.axis, rank.world.device, lambda: torch.tensor(2.0))
        for _ in range(2):
            consensus.open(torch.tensor(1.5), 10.0, 20, [0.0] * len(Tally), ())
            result = consensus.close(lambda: torch.tensor(9.0))
        assert all(value.device == rank.world.device for value in (result.loss_sum, result.squared_norm))  # type: ignore[union-attr]
        assert [float(result.loss_sum), float(result.squared_norm), float(result.next_count)] == [2.0, 9.0, 40.0]


def test_an_offloaded_shard_is_gathered_over_the_device() -> None:
    with simulated_rank(0, 4):
        mesh = init_device_mesh("simulated", (4,))
        offloaded = DTensor.from_local(torch.ones(2, 3, device="simulated:0"), mesh, [Shard(0)])
        offloaded._local_tensor = torch.ones(2, 3)  # as FSDP's CPUOffloadPolicy leaves it
        whole = full_tensor(offloaded)
        assert (whole.device.type, tuple(whole.shape)) == ("cpu", (8, 3))


def test_tensors_in_objects_arrive_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, they arrived on the sender's device, which another rank may not have."""
    moved: list[torch.Tensor] = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or real(tensor))
    monkeypatch.setattr(host_group, "_HOST", ("meta",))  # as if the CPU were an accelerator
    received: Any = pickle.loads(pickled({"logits": torch.ones(3), "weight": torch.nn.Parameter(torch.ones(2))}))
    assert [tensor.tolist() for tensor in received.values()] == [[1.0] * 3, [1.0] * 2]
    assert len(moved) == 2
    monkeypatch.undo()
    with simulated_rank(0, 4) as rank:
        assert rank.world.axis.gather(7) == [7] * 4
        assert rank.collectives == []


def _objects_beside_another_backend() -> list[object]:
    with stand_in.joined() as world:
        numbers = world.axis.gather((world.rank, torch.arange(world.rank)))
        first = world.axis.broadcast({"large": "x" * 100_000} if world.rank == 0 else None)
        world.axis.barrier()
        return [[rank for rank, _ in numbers], [len(own) for _, own in numbers], len(first["large"])]  # type: ignore


def test_objects_go_over_gloo_beside_another_backend() -> None:
    """The stand-in has no collective but a sum: before, objects were sent over it."""
    assert in_world(3, _objects_beside_another_backend) == [[[0, 1, 2], [0, 1, 2], 100_000]] * 3


def _objects_of_every_size(sizes: list[int]) -> list[bool]:
    with joined(Launch(), grouped=True) as world:
        mine = [
            world.axis.gather("x" * (size + world.rank)) == ["x" * (size + rank) for rank in range(2)] for size in sizes
        ]
        first = ["y" * size for size in sizes]
        return mine + [world.axis.broadcast(text if world.rank == 0 else None) == text for text in first]


def test_objects_of_every_size_arrive_whole() -> None:
    sizes = [0, 1, 1000, 100_000]
    assert in_world(2, _objects_of_every_size, sizes) == [[True] * (2 * len(sizes))] * 2


def _wait_beyond_the_timeout() -> None:
    with joined(Launch(timeout=1.0), grouped=True) as world:
        if world.rank == 0:
            time.sleep(2.0)
        world.axis.barrier()


def test_a_barrier_has_no_limit() -> None:
    in_world(2, _wait_beyond_the_timeout)


def _wait_for() -> str:
    try:
        with joined(Launch(timeout=60.0), grouped=True) as world:
            if world.rank == 1:
                raise ValueError("boom")
            world.axis.barrier()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_barrier_ends_when_a_rank_fails() -> None:
    message = "PeerFailed: rank 1 has failed, while the others waited for it"
    assert in_world(2, _wait_for)[0] == message


@pytest.mark.parametrize("ranks", [64, 1024])
def test_all_groups_of_an_axis_are_made_in_one_split(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a rank took part in a split for each of its axis' groups: 32 at 64 ranks, 512 at 1,024."""
    calls: list[Any] = []
    with simulated_rank(5, ranks):
        monkeypatch.setattr(collectives, "_splits", lambda: True)
        monkeypatch.setattr(dist, "split_group", lambda **arguments: calls.append(arguments))
        monkeypatch.setattr(dist, "new_group", lambda *arguments, **options: pytest.fail("a group by itself"))
        own_group((rank, rank + ranks // 2) for rank in range(ranks // 2))
    assert [len(call["split_ranks"]) for call in calls] == [ranks // 2]


def test_other_backends_make_the_same_groups() -> None:
    with simulated_rank(5, 64):
        group = own_group((rank, rank + 32) for rank in range(32))
        assert group is not None
        assert dist.get_process_group_ranks(group) == [5, 37]
        assert own_group([(0, 1)]) is None


def test_two_ranks_on_one_device_are_named() -> None:
    assert device_refusal(["cuda a/0", "cuda a/1", "cuda b/0"]) == ""
    assert device_refusal(["cpu", "cpu"]) == "", "ranks on the CPU share it"
    assert device_refusal(["cuda a/0", "cuda b/0", "cuda a/0"]).startswith(
        "ranks 0 and 2 have the same device, and 3 ranks have 2 of cuda; start one rank for each"
    )


def test_a_rank_without_an_accelerator_beside_others_with_one_is_named() -> None:
    """Before, it waited over gloo for ranks that waited over nccl, until `launch.timeout` was over."""
    assert device_refusal(["cuda a/0", "cuda a/1", "cpu"]).startswith("rank 0 computes on cuda and rank 2 on cpu; let")
    assert device_refusal(["cpu", "xpu a/0"]).startswith("rank 0 computes on cpu and rank 1 on xpu; let")
