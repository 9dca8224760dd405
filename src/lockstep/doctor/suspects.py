"""Finds the samples that all bad updates of a run have in common.

events.jsonl: bad_numbers   samples 135, 30, 143   samples 44, 30, 192   samples 30, 213   --> sample 30 is in all
"""

from __future__ import annotations

from lockstep.core.formatting import listed
from lockstep.report.run_data import RunData

_FEWEST = 2  # bad updates: each of one has its samples in common with itself
_MOST = 3  # samples in common: more are no finding


def common_suspects(data: RunData) -> list[str]:
    """Return a sentence about the samples that are in the suspected micro-batch of each bad update; none: no such."""
    suspected = [set(samples) for samples in data.suspected]
    common = sorted(set.intersection(*suspected).difference(data.left_out)) if len(suspected) >= _FEWEST else []
    if not 0 < len(common) <= _MOST:
        return []
    names, are, it = listed([*map(str, common)], _MOST), *(("are", "them") if len(common) > 1 else ("is", "it"))
    spans = ", ".join(f"[{sample}, {sample}]" for sample in common)
    return [
        f"Sample{'s' * (len(common) > 1)} {names} {are} in the suspected micro-batch of each of {len(suspected)} bad "
        f"updates: mend {it}, or leave {it} out by data.leave_out='[{spans}]'."
    ]
