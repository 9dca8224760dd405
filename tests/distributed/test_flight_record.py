"""The flight record: which collectives of a rank aren't complete, for the launcher and for torch's own reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.waiting import wait_until
from kit.worlds import in_world
from torch.distributed.flight_recorder import fr_trace

from lockstep.core import heartbeat
from lockstep.distributed.flight_record import flight_record
from lockstep.launch.rank_stacks import FlightRecord, answer_requests, flight_records


def _call_others(folder: Path) -> FlightRecord:
    """Call collectives that don't match; return what isn't complete."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    beat = heartbeat.shared_heartbeat()
    answer_requests(beat)
    numbers = torch.ones(2, 3)
    dist.all_reduce(numbers)
    dist.all_reduce(numbers, group=dist.new_group([0, 1]))
    waiting = dist.all_reduce(numbers, async_op=True) if rank else dist.barrier(async_op=True)
    assert waiting is not None
    wait_until(lambda: len(flight_record()[0]) == 1)  # gloo notes the end of the others a moment later
    (record,) = flight_records({rank: beat}).values()
    (folder / f"rank_{rank}").write_bytes(record.content)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"saved-{rank}", "")
    store.wait(["saved-0", "saved-1"])
    return record._replace(content=b"")


def test_what_is_not_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    barrier, reduction = in_world(2, _call_others, tmp_path)
    assert (barrier.pending, barrier.on_device) == (["barrier 2 of group 0"], False)
    assert (reduction.pending, reduction.on_device) == (["all_reduce 2 of group 0 (6 elements)"], False)
    fr_trace.main([str(tmp_path)])
    printed = "".join((*capsys.readouterr(), caplog.text))
    assert "Culprit rank 1" in printed
    assert "COLLECTIVE_TYPE_MISMATCH" in printed
