"""The flight record: which collectives of a rank aren't complete, for the launcher and for torch's own reader."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.waiting import wait_until
from kit.worlds import in_world
from torch._C import _distributed_c10d
from torch.distributed.flight_recorder import fr_trace

from lockstep.core import heartbeat
from lockstep.core.pending_collective import PendingCollective
from lockstep.distributed.flight_record import flight_record
from lockstep.launch.flight_records import (
    FlightRecord,
    answer_no_more,
    answer_requests,
    read_records,
    request_records,
    save_records,
)


def _plant_nccl() -> None:
    """Give torch a recorder of NCCL that has collectives of its own, and one of gloo's."""
    gloo = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    call, operation = gloo["entries"][0], ("all_gather", "reduce_scatter")[int(os.environ["RANK"])]
    later = {
        "record_id": 7, "profiling_name": f"nccl:{operation}", "time_created_ns": call["time_created_ns"] + 1,
        "collective_seq_id": 9, "state": "started", "retired": False, "process_group": ("devices", "mesh"),
    }  # fmt: skip
    groups = {"devices": {"name": "devices", "desc": "mesh", "ranks": "[0, 1]"}}
    entries = [{**call, **later, "record_id": 6, "state": "completed"}, {**call, **later}, call]
    record = {**gloo, "pg_config": groups, "comm_lib_version": "2.29.3", "entries": entries}
    _distributed_c10d._dump_nccl_trace = partial(pickle.dumps, record)  # type: ignore[attr-defined]


def _read_both() -> tuple[list[PendingCollective], dict[str, Any], int]:
    """Return what isn't complete, and the record, where torch also has NCCL's; and the number of gloo's collectives."""
    dist.init_process_group("gloo")
    for _ in range(2):
        dist.all_reduce(torch.ones(2, 3))
    gloo = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    _plant_nccl()
    pending, content = flight_record()
    return pending, pickle.loads(content), len(gloo["entries"])


def test_the_recorders_of_nccl_and_gloo_are_one_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    both = in_world(2, _read_both)
    (tmp_path / "flight_record").mkdir()
    for rank, (pending, record, of_gloo) in enumerate(both):
        (of_devices,) = [
            each for each in pending if each.on_device
        ]  # gloo notes the end of its last one a moment later
        assert (of_devices.number, of_devices.group, of_devices.ranks) == (9, "devices", [0, 1])
        assert len(record["entries"]) == of_gloo + 2, "each once"
        assert [each["profiling_name"] for each in record["entries"][:2]] == [f"nccl:{of_devices.operation}"] * 2
        assert {*record["pg_config"]} >= {"0", "devices"}
        assert record["comm_lib_version"] == "2.29.3"
        (tmp_path / "flight_record" / f"rank_{rank}").write_bytes(pickle.dumps(record))
    fr_trace.main([str(tmp_path / "flight_record")])
    printed = "".join((*capsys.readouterr(), caplog.text))
    assert "reduce_scatter" in printed
    assert "COLLECTIVE_TYPE_MISMATCH" in printed


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
    wait_until(lambda: len(flight_record()[0]) == 1)  # gloo notes the end of the others a moment later
    records = read_records({rank: beat}, request_records({rank: beat}))
    save_records(folder, records, 60.0)
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


def test_records_of_another_hang_are_removed(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    folder, record = tmp_path / "flight_record", FlightRecord((), b"of this hang")
    save_records(tmp_path, {}, 10.0)
    assert not folder.exists()
    save_records(tmp_path, dict.fromkeys(range(4), FlightRecord((), b"earlier")), 10.0)
    (folder / ".rank_3.17.new").write_bytes(b"torn")
    for path in folder.iterdir():
        os.utime(path, (path.stat().st_mtime - 20.0,) * 2)
    (folder / "rank_2").write_bytes(b"another host's")
    earlier = (folder / "rank_0").open("rb")
    save_records(tmp_path, {0: record}, 10.0)
    assert names() == ["rank_0", "rank_2"]
    assert (folder / "rank_0").read_bytes() == b"of this hang"
    with earlier:
        assert earlier.read() == b"earlier", "who reads has a whole record"
    save_records(tmp_path, {1: record}, 10.0)
    assert names() == ["rank_0", "rank_1", "rank_2"], "rank 0 has written none this time"
    save_records(tmp_path, {}, -1.0)
    assert names() == []
