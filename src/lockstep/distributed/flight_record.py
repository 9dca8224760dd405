"""The flight record: torch's own list of a rank's last collectives, with those that aren't complete.

torch keeps the last 2,000 (`TORCH_FR_BUFFER_SIZE`), under NCCL as under gloo: number, group, sizes, the Python lines
that called it. Under NCCL, the collective that a program has called last
isn't the one that its device waits in: the host runs ahead.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from lockstep.core.pending_collective import PendingCollective

_MOST_PENDING = 16


def flight_record() -> tuple[list[PendingCollective], bytes]:
    """Return this rank's collectives that aren't complete, the oldest first, and the record for torchfrtrace."""
    record = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    groups = record["pg_config"] = {**record["pg_config"], **_groups()}  # gloo's groups aren't in it
    entries = [each for each in record.get("entries", ()) if not each["retired"] and each["state"] != "completed"]
    return [_pending(entry, groups) for entry in entries[:_MOST_PENDING]], pickle.dumps(record)


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
