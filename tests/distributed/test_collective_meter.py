"""Bytes and waits of all collectives, of torch as of its users."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.worlds import in_world

from lockstep.core.collective_names import bus_factor
from lockstep.core.phase_clock import Phase, PhaseClock
from lockstep.distributed.collective_meter import CollectiveMeter, CollectiveTotals
from lockstep.distributed.notice_board import NoticeBoard
from lockstep.distributed.process_group import ReducedGradients


def measured(rank: int) -> dict[str, Any]:
    clock = PhaseClock()
    clock.updated()
    meter = CollectiveMeter(clock)
    original = dist.ProcessGroup.allreduce
    with meter.measuring():
        tensor = torch.ones(1000)
        if rank == 1:
            time.sleep(0.3)
        dist.all_reduce(tensor)  # rank 0 waits for rank 1
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather([torch.empty(10), torch.empty(10)], torch.ones(10))
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    assert dist.ProcessGroup.allreduce == original
    clock.updated()
    times = clock.take()
    totals = {operation: (each.calls, each.size) for (operation, _), each in meter.totals.items()}
    timed = meter.totals["all_reduce", 2]
    return {
        "waited": times.split[Phase.COMMUNICATION],
        "totals": totals,
        "timed": (timed.timed_size, timed.timed_seconds),
        "value": tensor[0].item(),
        "gauges": meter.gauges(),
    }


def on_two_ranks() -> Any:
    dist.init_process_group("gloo")
    result = measured(dist.get_rank())
    dist.destroy_process_group()
    return result


def test_a_rank_waits_for_the_late_one_and_all_bytes_are_counted() -> None:
    first, second = in_world(2, on_two_ranks)
    assert first["waited"] > 0.25 > 0.2 > second["waited"]
    moved = {"all_reduce": (2, 8000), "all_gather": (1, 80)}
    assert first["totals"] == moved | {"send": (1, 4000)}
    assert second["totals"] == moved | {"recv": (1, 4000)}
    assert first["value"] == second["value"] == 4.0
    assert first["gauges"]["all_reduce_bytes"] == 8000
    # of two ranks, bus and algorithm bandwidth are equal
    size, seconds = first["timed"]  # the late rank may find both complete: it has waited for none
    assert first["gauges"]["all_reduce_bus_bytes_per_second"] == size / seconds > 0


def test_a_bandwidth_of_few_of_the_bytes_is_left_out() -> None:
    reduced = ReducedGradients()
    meter = CollectiveMeter(PhaseClock(), reduced)
    meter.totals["all_reduce", 2] = CollectiveTotals(1, 100, 100, 2.0)
    assert meter.gauges() == {"all_reduce_bytes": 100, "all_reduce_bus_bytes_per_second": 50.0}
    reduced.size = 1000
    assert meter.gauges() == {"all_reduce_bytes": 1100}
    assert CollectiveMeter(PhaseClock(), reduced).gauges() == {"all_reduce_bytes": 1000}


@pytest.mark.parametrize(
    ("operation", "factor"), [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("broadcast", 1)]
)
def test_the_factors_of_bus_bandwidth_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    assert bus_factor(operation, 8) == factor


def post_and_read() -> list[bytes | None]:
    dist.init_process_group("gloo")
    board = NoticeBoard(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 1:
        board.post(b"early")
        board.post("später \0".encode())
    dist.barrier()
    latest = board.latest()
    dist.barrier()
    dist.destroy_process_group()
    return latest


def test_all_ranks_read_the_latest_notice_of_each() -> None:
    assert in_world(3, post_and_read) == [[None, "später \0".encode(), None]] * 3
