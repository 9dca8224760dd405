"""The flight record: which collectives of a rank aren't complete, for the launcher and for torch's own reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.worlds import in_world
from torch.distributed.flight_recorder import fr_trace

from lockstep.core import heartbeat
from lockstep.core.pending_collective import PendingCollective
from lockstep.launch.flight_records import answer_no_more, answer_requests, read_records, request_records, save_records


def _call_others(folder: Path) -> list[PendingCollective]:
    """Call collectives that don't match; return what isn't complete."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    beat = heartbeat.heartbeats(1)[0]
    answer_requests(beat)
    numbers = torch.ones(2, 3)
    dist.all_reduce(numbers)
    dist.all_reduce(numbers, group=dist.new_group([0, 1]))
    waiting = dist.all_reduce(numbers, async_op=True) if rank else dist.barrier(async_op=True)
    assert waiting is not None
    records = read_records({rank: beat}, request_records({rank: beat}), [rank])
    save_records(folder, records)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"saved-{rank}", "")
    store.wait(["saved-0", "saved-1"])
    answer_no_more(beat)
    return list(records[rank].pending)


def test_what_is_not_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    barrier, reduction = in_world(2, _call_others, tmp_path)
    common = {"number": 2, "group": "0", "ranks": [0, 1], "on_device": False, "is_started": False}
    assert barrier == [PendingCollective(operation="barrier", sizes=[], **common)]
    assert reduction == [PendingCollective(operation="all_reduce", sizes=[[2, 3]], **common)]
    fr_trace.main([str(tmp_path / "flight_record")])
    printed = "".join((*capsys.readouterr(), caplog.text))
    assert "Culprit rank 1" in printed
    assert "COLLECTIVE_TYPE_MISMATCH" in printed
