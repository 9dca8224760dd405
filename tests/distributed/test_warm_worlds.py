"""The ranks of tests share what takes long: one server that they are forked from, and the shapes of torch's results."""

from __future__ import annotations

import os
from pathlib import Path

from kit import sharding_memory
from kit.worlds import in_world


def test_the_workers_of_a_test_run_have_one_server() -> None:
    server = in_world(1, os.getppid)[0]
    first = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    started_by = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(started_by) == first


def _product(columns: int) -> tuple[tuple[int, ...], list[str]]:
    """Shape of a product of sharded matrices; what wasn't known of it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    left = distribute_tensor(torch.ones(6, 10), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(10, columns), mesh, [Shard(1)])
    shape = tuple((left @ right).shape)
    dist.destroy_process_group()
    return shape, [key for key in sharding_memory._new if "mm" in key]


def test_a_shape_that_ranks_have_found_is_not_asked_for_again() -> None:
    columns = 1000 + os.getpid() * 16
    shape, keys = in_world(1, _product, columns)[0]
    assert shape == (6, columns)
    assert len(keys) == 1
    assert in_world(2, _product, columns) == [((6, columns), [])] * 2
    other, keys = in_world(1, _product, columns + 2)[0]
    assert (other, len(keys)) == ((6, columns + 2), 1)
