"""The watch over ranks that another launcher has started (torchrun, srun): a process beside them, one on each host.

The first rank of a host opens the heartbeats of all (/proc/PID/fd), and starts a process that inherits them. It names
a rank that hangs and kills it, so that the launcher notices. A thread couldn't, while its rank holds the interpreter's
lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core import heartbeat
from lockstep.core.errors import named_ranks
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import READY, STAGE, Files, Heartbeat, Stage, shared_heartbeat
from lockstep.core.processes import machine
from lockstep.core.ranks import names_a_rank, started_by_lockstep
from lockstep.launch.ends import End, while_reading
from lockstep.launch.hang_watch import HangWatch
from lockstep.launch.outcome import print_on_stderr
from lockstep.launch.rank_stacks import answer_requests
from lockstep.launch.supervision import advice_on_samples

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Control

_TICK_S = 0.1


@contextlib.contextmanager
def watched_from_outside(config: Config, logs: Path | None) -> Iterator[Callable[[Control], None]]:
    """Yield a function, which all ranks call together, that lets them be watched until the block ends.

    It does nothing under Lockstep's launcher, which watches them.
    """
    options = config.recovery.watchdog
    if not options.enabled or not names_a_rank(os.environ) or started_by_lockstep(os.environ):
        yield lambda ranks: None
        return
    before, own = heartbeat.own(), _heartbeat_of_process()
    own.numbers[:READY] = before.numbers[:READY]
    heartbeat.use(own)

    def watch(ranks: Control) -> None:
        places = cast("list[tuple[str, int, Sequence[int]]]", ranks.gather((machine(), os.getpid(), tuple(own.files))))
        here = [rank for rank, (place, _, _) in enumerate(places) if place == places[ranks.rank][0]]
        if ranks.rank == here[0]:
            task = {"first": here[0], "alone": len(here) == ranks.size, "processes": [places[rank][1] for rank in here]}
            task |= {"options": options.model_dump(), "logs": None if logs is None else str(logs)}
            _start(task, here, [places[rank] for rank in here])

    try:
        yield watch
    finally:
        own.numbers[STAGE] = Stage.LEFT
        heartbeat.use(before)


@cache
def _heartbeat_of_process() -> Heartbeat:
    """Return the heartbeat that others can open, which this process keeps: it may train again, or be asked late."""
    beat = shared_heartbeat()
    answer_requests(beat)
    return beat


def _start(task: Mapping[str, object], ranks: Sequence[int], places: Sequence[tuple[str, int, Sequence[int]]]) -> None:
    with contextlib.ExitStack() as opened:
        try:
            paths = [[f"/proc/{process}/fd/{file}" for file in files] for _, process, files in places]
            files = [[opened.enter_context(open(path, "r+b", 0)).fileno() for path in each] for each in paths]
            subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, json.dumps({**task, "files": files})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[file for each in files for file in each],
                start_new_session=True,  # Ctrl-C and the launcher's signals are the ranks'
            )
        except OSError as error:
            print_on_stderr(f"lockstep: {named_ranks(ranks)} can't be watched for hangs: {error.strerror or error}")


# --- in the process beside the ranks --------------------------------------------------------------------------------


class OutsideRank:
    """A rank, as the watch sees it: nothing is known of how it ends."""

    def __init__(self, pid: int, beat: Heartbeat) -> None:
        self.process, self.pid, self._beat = self, pid, beat
        self.reported: End | None = None
        self.ended: End | None = None
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)

    def update(self) -> None:
        """Note whether the process has ended, or has left the others."""
        if self._handle is None or select.select([self._handle], [], [], 0)[0]:
            end = End(FailureKind.KILLED, "was killed, or has exited", time.monotonic())
            self.ended = self.reported or while_reading(end, self._beat.reading())
        elif self._beat.numbers[STAGE] == Stage.LEFT:
            self.ended = End(FailureKind.DONE, "", time.monotonic())

    def kill_hung(self, end: End) -> None:
        self.reported = end
        print_on_stderr(f"lockstep: process {self.pid} still hangs, and is killed")
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _watch(watch: HangWatch, ranks: Sequence[OutsideRank]) -> None:
    while living := [rank for rank in ranks if rank.ended is None]:
        watch.look(ranks)
        time.sleep(_TICK_S)
        is_first = len(living) == len(ranks)  # how the others end is up to their launcher
        for rank in living:
            rank.update()
            if is_first and rank.ended is not None and (advice := advice_on_samples(rank.ended)):
                number = watch.first + ranks.index(rank)
                print_on_stderr(f"lockstep: rank {number} has ended while it read a sample: {advice}")


def main(task: str) -> None:
    """Watch the ranks that a task names, until the last of them has ended."""
    from lockstep.config.training_sections import Watchdog

    values = json.loads(task)
    logs = None if values["logs"] is None else Path(values["logs"])
    beats = [Heartbeat(Files(*files)) for files in values["files"]]
    watch = HangWatch(Watchdog(**values["options"]), beats, logs, values["first"], alone=values["alone"])
    _watch(watch, [*map(OutsideRank, values["processes"], beats)])


if __name__ == "__main__":
    main(sys.argv[1])
