"""The record of an elastic launch in the folder of its run, where the launcher keeps no store for its ranks.

    RUN/logs/launch.json    {"launch": "none", "launchers": [[machine, process, start], ...], "begun": true}

torchrun keeps none under TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Ranks belong to the launch that is recorded if it has
their launch's id, and one of its launchers has started one of them: that of any host, since other hosts may have been
replaced. A launch whose hosts have all been replaced is another one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.processes import identity, parent
from lockstep.core.ranks import started_by_lockstep
from lockstep.monitor.folder import LOGS

if TYPE_CHECKING:
    from lockstep.distributed.process_group import World

_FILE = "launch.json"
_ID = "TORCHELASTIC_RUN_ID"


class LaunchProgress(IntEnum):
    """The progress that earlier ranks of this launch have made with a run."""

    NONE = 0
    FOLDER = 1  # they have created, or taken, its folder
    BEGUN = 2  # they have begun to train


def is_recorded(world: World, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an elastic launch has no store that knows what its earlier ranks have done."""
    return world.launcher_store is None and _ID in environ and not started_by_lockstep(environ)


def progress_of_launch(world: World, folder: Path | None) -> LaunchProgress:
    """Return what the record in a folder states, which the first rank reads. All ranks together."""
    return _compare(world, folder)[0]


def record_launch(world: World, folder: Path, progress: LaunchProgress) -> None:
    """Record how far this launch has come, if its earlier ranks haven't come as far. All ranks together."""
    known, launchers = _compare(world, folder)
    if world.rank == 0 and (known < progress or progress is LaunchProgress.BEGUN):  # whose launchers may be others now
        record = {"launch": os.environ[_ID], "launchers": launchers, "begun": progress is LaunchProgress.BEGUN}
        with suppress(OSError):
            write_atomically(folder / LOGS / _FILE, json.dumps(record) + "\n", durable=False)


def _compare(world: World, folder: Path | None) -> tuple[LaunchProgress, list[list[object]]]:
    """Return the progress of this launch, and the launchers of its ranks."""
    record = _read(folder) if world.rank == 0 and folder is not None else {}
    gathered = cast("list[tuple[list[object], dict[str, object]]]", world.axis.gather((_launcher(), record)))
    launchers: list[list[object]] = []
    for launcher, _ in gathered:
        if launcher not in launchers:
            launchers.append(launcher)
    known = gathered[0][1]
    recorded = known.get("launchers")
    if known.get("launch") != os.environ[_ID] or not isinstance(recorded, list):
        return LaunchProgress.NONE, launchers
    if not any(launcher in recorded for launcher in launchers if all(launcher)):
        return LaunchProgress.NONE, launchers
    return LaunchProgress.BEGUN if known.get("begun") is True else LaunchProgress.FOLDER, launchers


def _launcher() -> list[object]:
    """Return the process that has started this rank, perhaps by a script."""
    process = os.getppid()
    with suppress(OSError):  # of a process of another user, which is no script of this one
        while f"\0{_ID}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
            process = parent(process)
    return [*identity(process)]


def _read(folder: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads(read_bounded(folder / LOGS / _FILE, MAX_JSON_BYTES))
        if isinstance(record, dict):
            return record
    return {}
