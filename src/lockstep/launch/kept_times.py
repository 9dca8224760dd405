"""The times that a watch beside the ranks has learned, for the next round of the same launch (torchrun --max-restarts).

    the last rank of a round has ended --> /dev/shm/lockstep-1000-times-<launcher>-<opening>/times
    the next round begins              --> read, and removed

So it is there only between two rounds, and goes with the launcher if a person stops that.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.core.files import read_bounded
from lockstep.core.processes import started
from lockstep.launch.hang_watch import LearnedTimes
from lockstep.launch.memory_folder import ROOT, is_own, prefix

_FILE = "times"
_MOST_BYTES = 2**16
_TICK_S = 0.2
_ENDS_S = 60.0  # from the end of its ranks to its own


def times_folder(opening: int, environ: Mapping[str, str] = os.environ) -> tuple[Path | None, bool]:
    """Return the folder for the times of this rank's launch and opening, and whether another round may follow.

    The folder is None under a launcher that doesn't start ranks again.
    """
    restarts, most = (environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not restarts.isdigit() or not most.isdigit() or int(most) == 0:
        return None, False
    if not (begun := started(os.getppid())):
        return None, False
    return ROOT / f"{prefix()}times-{os.getppid()}-{begun}-{opening}", int(restarts) < int(most)


def keep(folder: Path, run: str, times: LearnedTimes) -> None:
    """Keep the times of a run for the next round; do nothing where that isn't possible."""
    fields = {"run": run, "first": times.first, "slowest_start": times.slowest_start, "recent": [*times.recent]}
    with suppress(OSError):
        folder.mkdir(mode=0o700)
        (folder / _FILE).write_text(json.dumps(fields), encoding="utf-8")


def remove_without(launcher: int, folder: Path) -> None:
    """Remove the folder if the launcher ends, and so no other round takes it."""
    until = time.monotonic() + _ENDS_S
    while folder.exists() and time.monotonic() < until:
        if not Path(f"/proc/{launcher}").exists():
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_TICK_S)


def take(folder: Path, run: str) -> LearnedTimes:
    """Return the times that the round before has kept, and remove them; new ones if there are none of this run."""
    times = LearnedTimes()
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        if not is_own(folder):
            return times
        fields = json.loads(read_bounded(folder / _FILE, _MOST_BYTES))
        first, slowest, *recent = map(float, (fields["first"], fields["slowest_start"], *fields["recent"]))
        if fields["run"] == run and all(math.isfinite(each) and each >= 0 for each in (first, slowest, *recent)):
            times.first, times.slowest_start = first, slowest
            times.recent.extend(recent)
    shutil.rmtree(folder, ignore_errors=True)
    return times
