"""Refuses names for what user code logs that the run's own curves have: two values of a step would be one curve.

train/loss, gpu_power/max   the run's own: refused      train/accuracy, loss, gpu_power   user code's
"""

from __future__ import annotations

import re

from lockstep.core.collective_names import OPERATIONS

_OWN = frozenset(
    {
        *(f"train/{name}" for name in ("loss", "grad_norm", "lr", "loss_scale", "discarded")),
        *(f"speed/{name}" for name in ("samples_per_second", "tokens_per_second", "mfu")),
        *(f"save/{name}" for name in ("seconds", "lost_seconds")),
        *(f"epoch/{name}" for name in ("loss", "seconds")),
        *(f"ranks/{name}" for name in ("step_seconds", "slowest_step_seconds")),
        *(f"run/{name}" for name in ("attempt", "resumed_from", "failure")),
        "step",
        "checkpoint",
    }
)
_OWN_GROUPS = ("evaluation", "time")
_COLLECTIVES = "|".join(sorted({name for name, _ in OPERATIONS.values()}))
_GAUGE = re.compile(
    r"(memory_(resident|allocated|reserved)(_peak)?|(host_)?cpu_percent|core_wait_percent|host_(memory_used|memory_free|"
    r"swap_used)|disk_(free|read_rate|write_rate)|network_(sent|received)_rate|gpu_\w+|"
    rf"({_COLLECTIVES})_(bytes|bus_bytes_per_second))/(min|mean|max)"
)


def refuse_own_name(kind: str, name: str) -> None:
    """Raise ValueError for a name that the run itself writes, or that is empty; the message has one that isn't."""
    group, _, rest = name.partition("/")
    if not name.strip():
        raise ValueError(f"log.{kind}({name!r}): the name is empty; give it one, such as 'accuracy'")
    if name in _OWN or (rest and group in _OWN_GROUPS) or _GAUGE.fullmatch(name):
        other = f"own_{name}" if not rest else f"{group}/own_{rest}" if group not in _OWN_GROUPS else f"own_{name}"
        raise ValueError(f"log.{kind}({name!r}): the run itself writes {name}; give it another name, such as {other!r}")
