"""Looks for the effect of a fault in what its run has left: one that has changed nothing proves nothing.

kill, hang, ..., oom, diverge, host, shrink     another attempt: the ranks have started again
flip                                            another attempt, and a checkpoint that was found broken
nan                                             an update that was repeated
badsample                                       samples that are left out
sample, full, ..., partition, ...               nothing more: the fault is noted by what meets it
stop                                            the same: the launcher may continue the rank
"""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.chaos.references import left_out
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.events import EVENTS
from lockstep.resilience.disk_faults import DISK_KINDS, FLIP, SAMPLE
from lockstep.resilience.faults import NETWORK_KINDS, STOP
from lockstep.resilience.number_faults import BAD_SAMPLE, NAN

_BROKEN = "checkpoints/broken-step-*"


def has_effect(kind: str, run: Path) -> bool:
    """Return whether the run in a folder shows the effect of a fault that has fired.

    Raises:
        OSError, ValueError, Failure: The run has not left what would show it.
    """
    if kind in (STOP, SAMPLE, *DISK_KINDS, *NETWORK_KINDS):
        return True
    if kind == NAN:
        lines = (run / EVENTS).read_text(encoding="utf-8").splitlines()
        return any(json.loads(line).get("bad_numbers") == "repeated" for line in lines)
    if kind == BAD_SAMPLE:
        return bool(left_out(run))
    if kind == FLIP and not any(run.glob(_BROKEN)):
        return False
    return len(read_attempts(run)) > 1
