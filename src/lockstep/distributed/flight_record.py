"""The flight record: torch's own list of a rank's last collectives, with those that aren't complete.

torch keeps the last 2,000 (`TORCH_FR_BUFFER_SIZE`): number, group, sizes, the Python lines that called it. It has a
recorder for NCCL and another one for gloo; here they are one record. Under NCCL, the collective that a program has
called last isn't the one that its device waits in: the host runs ahead.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from lockstep.core.pending_collective import PendingCollective

_MOST_PENDING = 16
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # NCCL's, which a build without CUDA lacks, and gloo's
_PARTS = ("pg_config", "pg_status")
_IDENTITY = ("record_id", "time_created_ns", "process_group", "profiling_name")  # of a collective in a record


def flight_record() -> tuple[list[PendingCollective], bytes]:
    """Return this rank's collectives that aren't complete, the oldest first, and the record for torchfrtrace."""
    record = _merged([pickle.loads(dump()) for dump in _dumps()])
    groups = record["pg_config"] = {**record["pg_config"], **_groups()}  # gloo's groups aren't in it
    entries = [each for each in record["entries"] if not each["retired"] and each["state"] != "completed"]
    entries.sort(key=itemgetter("time_created_ns"))
    return [_pending(entry, groups) for entry in entries[:_MOST_PENDING]], pickle.dumps(record)


def _dumps() -> list[Callable[[], bytes]]:
    """Return what reads each of torch's recorders."""
    dumps = [getattr(_distributed_c10d, name, None) for name in _RECORDERS]
    return [dump for dump in dumps if dump is not None]


def _merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one record with the collectives of all, each once.

    Those of the first recorder that has some are the first: torchfrtrace aligns ranks by the number of their first one.
    """
    merged: dict[str, Any] = {}
    for record in reversed(records):
        merged |= record
    for part in _PARTS:
        merged[part] = {key: value for record in records for key, value in record.get(part, {}).items()}
    entries = [entry for record in records for entry in record.get("entries", ())]
    return {**merged, "entries": [*{tuple(map(repr, map(each.get, _IDENTITY))): each for each in entries}.values()]}


def _groups() -> dict[str, dict[str, str]]:
    """Return the groups of this rank by name, as the record has them."""
    return {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in list(dist.distributed_c10d._world.pg_names.items())
    }


def _pending(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, str]]) -> PendingCollective:
    name = entry["process_group"][0]
    backend, _, operation = entry["profiling_name"].partition(":")
    return PendingCollective(
        operation=operation,
        number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        group=name,
        ranks=json.loads(groups.get(name, {}).get("ranks", "[]")),
        sizes=entry["input_sizes"],
        on_device=backend != "gloo",
        is_started=entry["state"] == "started",
    )
