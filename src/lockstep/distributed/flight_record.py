"""The flight record: torch's list of a rank's last 2,000 collectives (`TORCH_FR_BUFFER_SIZE`), also incomplete ones.

Under NCCL the host runs ahead: the last collective that was called isn't the one that the device waits in.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

_MOST_PENDING = 16
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # NCCL's, which a build without CUDA lacks, and gloo's


def flight_record() -> tuple[list[str], bool, bytes]:
    """Return the incomplete collectives, whether they run on a device, and the record for torchfrtrace."""
    for recorder in _RECORDERS:
        dump = getattr(_distributed_c10d, recorder, None)
        record: dict[str, Any] = {} if dump is None else pickle.loads(dump())
        if record.get("entries"):
            break
    else:
        return [], False, b""
    record["pg_config"] = {**record.get("pg_config", {}), **_groups()}  # gloo's groups aren't in it
    pending = [each for each in record["entries"] if not each["retired"] and each["state"] != "completed"]
    pending.sort(key=itemgetter("time_created_ns"))
    on_device = bool(pending) and not pending[0]["profiling_name"].startswith("gloo")
    return [*map(_shown, pending[:_MOST_PENDING])], on_device, pickle.dumps(record)


def _groups() -> dict[str, dict[str, str]]:
    return {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in list(dist.distributed_c10d._world.pg_names.items())
    }


def _shown(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    elements = sum(map(math.prod, entry["input_sizes"]))
    size = f" ({elements:,} elements)" if elements else ""
    started = ", started on the device," if entry["state"] == "started" else ""  # with TORCH_NCCL_ENABLE_TIMING
    operation = entry["profiling_name"].partition(":")[2]
    return f"{operation} {number:,} of group {entry['process_group'][0]}{size}{started}"
