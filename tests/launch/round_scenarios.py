"""Launches for tests whose ranks are started again after a failure."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launch_scenarios import play

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Recovery, Watchdog
from lockstep.core.ranks import RankEnvironment
from lockstep.launch import group, local, starting
from lockstep.launch.local import launch
from lockstep.launch.supervision import Supervisor

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def supervised(
    script: Sequence[str],
    step: int = 7,
    failures: int = 0,
    stop: str = "",
    logs: str | None = None,
) -> int:
    """Launch ranks, of which rank N performs script[N] in the first round, and nothing in the second.

    Args:
        step: The step that the run has reached.
        failures: How many tries to start them again fail, for lack of processes.
        stop: When the launcher is stopped: "start", at the first of these tries; "record", once the first round's
            result is recorded.
    """
    group._GRACE, group._SETTLE, starting._PAUSES_S = 0.5, 0.2, (0.05, 0.05)
    begin, record, tries = starting.Round.begin, local.append_ends, iter([False, *[True] * failures])

    def refusing(job: starting.Ranks, **options: Any) -> starting.Round:
        if not next(tries, False):
            return begin(job, **options)
        if stop == "start":
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def recording(*arguments: Any) -> None:
        record(*arguments)
        if stop == "record":
            os.kill(os.getpid(), signal.SIGTERM)

    starting.Round.begin, local.append_ends = refusing, recording  # type: ignore[method-assign]
    again = partial(play, ["return:0"] * len(script))
    supervisor = Supervisor(Recovery(restarts=1), lambda: step, lambda: again)
    folder = Path(logs) if logs else None
    return launch(partial(play, list(script)), len(script), Launch(), folder, supervisor=supervisor).show()


def orphaned(folder: str) -> int:
    """Launch a rank that dies before a process of its own, to which this launcher becomes the parent; 0: it is gone.

    Only ranks and orphans are waited for: a process that this program has started before is left to it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
    supervisor = Supervisor(Recovery(), lambda: 7, lambda: partial(_after_orphan, Path(folder)))
    code = launch(partial(_leave_orphan, Path(folder)), 2, Launch(), None, supervisor=supervisor, watchdog=Watchdog())
    return code.show() or int(own.wait() != 5)


def _leave_orphan(folder: Path) -> int:
    if RankEnvironment.read(os.environ).rank == 0:
        time.sleep(30.0)
    rank, orphan = os.getpid(), os.fork()
    if orphan == 0:
        while os.getppid() == rank:
            time.sleep(0.01)
        os._exit(0)
    (folder / "orphan").write_text(str(orphan))
    os.kill(rank, signal.SIGKILL)
    return 0


def _after_orphan(folder: Path) -> int:
    until = time.monotonic() + 20.0
    orphan = Path("/proc", (folder / "orphan").read_text())
    while orphan.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return int(orphan.exists())
