"""Launches for tests whose ranks are started again after a failure."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launch_scenarios import play

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Recovery
from lockstep.core.errors import RunFailed
from lockstep.launch import local, worker_group
from lockstep.launch.local import launch
from lockstep.launch.supervision import Supervisor


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
        stop: "record": the launcher is stopped once the first round's result is recorded.
    """
    worker_group._GRACE, worker_group._SETTLE, local._FREED_S = 0.5, 0.2, 2.0
    begin, record, tries = worker_group.Round.begin, local.append_ends, iter([False, *[True] * failures])

    def refusing(job: worker_group.Ranks, **options: Any) -> worker_group.Round:
        if not next(tries, False):
            return begin(job, **options)
        raise RunFailed(f"its ranks can't be started: {OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))}")

    def recording(*arguments: Any) -> None:
        record(*arguments)
        if stop == "record":
            os.kill(os.getpid(), signal.SIGTERM)

    worker_group.Round.begin, local.append_ends = refusing, recording  # type: ignore[method-assign]
    again = partial(play, ["return:0"] * len(script))
    supervisor = Supervisor(Recovery(restarts=1), lambda: step, lambda: again)
    folder = Path(logs) if logs else None
    return launch(partial(play, list(script)), len(script), Launch(), folder, supervisor=supervisor).show()
