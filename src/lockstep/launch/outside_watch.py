"""The watch over ranks that another launcher has started (torchrun, srun): a process beside them, one on each host.

    rank 0 of the host   --> starts it
    all ranks of it      --> write their heartbeats into files in /dev/shm, which their launcher's process id names
    the process          --> names a rank that hangs, on rank 0's stderr, and kills it, so that the launcher notices
                             ends with the last rank

A thread of a rank could do neither, while that rank holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core import heartbeat
from lockstep.core.heartbeat import PROCESS, READY, Heartbeat, mapped_heartbeats
from lockstep.core.ranks import RankEnvironment, names_a_rank, started_by_lockstep
from lockstep.core.stopping import STACKS_SIGNAL
from lockstep.launch.deadly_samples import DeadlySamples
from lockstep.launch.ends import End, EndKind, while_reading
from lockstep.launch.flight_records import answer_no_more, answer_requests
from lockstep.launch.hang_watch import HangWatch
from lockstep.launch.memory_folder import ROOT, is_own, prefix
from lockstep.launch.outcome import print_on_stderr

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_TICK_S = 0.1
_COMES_S = 600.0  # until all ranks of the host have begun
_LEFT = -1.0  # instead of its process: the rank has left
_RUNS = End(EndKind.DONE, 0, "", 0.0)
_openings = count()


@contextlib.contextmanager
def watched_from_outside(config: Config, logs: Path | None) -> Iterator[None]:
    """Watch this rank and the others of its host while the block runs, unless Lockstep's launcher does.

    Args:
        logs: Of the run, for the stacks of a rank that hangs, and the samples whose reading ends one.
    """
    environ, options = os.environ, config.recovery.watchdog
    folder = None
    if options.enabled and names_a_rank(environ) and not started_by_lockstep(environ):
        folder = _shared_folder()
    if folder is None:
        yield
        return
    rank = RankEnvironment.read(environ)
    beats, before = mapped_heartbeats(folder, rank.local_world_size), heartbeat.own()
    own = beats.pop(rank.local_rank)
    for beat in beats:
        beat.close()
    own.numbers[:] = before.numbers
    faulthandler.register(STACKS_SIGNAL, file=own.files.stacks)
    answer_requests(own)
    own.numbers[READY], own.numbers[PROCESS] = 1, os.getpid()
    heartbeat.use(own)
    if rank.local_rank == 0:
        _start(folder, config, logs, rank)
    try:
        yield
    finally:
        own.numbers[PROCESS] = _LEFT
        answer_no_more(own)
        heartbeat.use(before)


def _shared_folder() -> Path | None:
    """Return the folder of the ranks that this rank's launcher has started on this host, at this opening."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = ROOT / f"{prefix()}watch-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}-{restarts}-{next(_openings)}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return path if is_own(path) else None
    except OSError:
        return None


def _start(folder: Path, config: Config, logs: Path | None, rank: RankEnvironment) -> None:
    deadly = None if logs is None else DeadlySamples.of(config, logs)
    task = {
        "folder": str(folder),
        "options": config.recovery.watchdog.model_dump(),
        "logs": None if logs is None else str(logs),
        "deadly": None if deadly is None else (deadly.data, deadly.skips),
        "ranks": rank.local_world_size,
        "first": rank.rank,
        "alone": rank.local_world_size == rank.world_size,
    }
    with contextlib.suppress(OSError):  # the ranks train without it
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the launcher's signals are the ranks'
        )


# --- in the process beside the ranks --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KnownProcess:
    pid: int


@dataclass
class _OutsideRank:
    """A rank, as the watch sees it: nothing is known of how it ends."""

    beat: Heartbeat
    process: _KnownProcess = field(init=False)
    reported: End | None = None
    ended: End | None = None
    _handle: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.process = _KnownProcess(int(self.beat.numbers[PROCESS]))
        if self.process.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                self._handle = os.pidfd_open(self.process.pid)

    def update(self) -> None:
        """Note whether the process has ended, or has left the others."""
        if self.beat.numbers[PROCESS] == _LEFT:
            self.ended = End(EndKind.DONE, 0, "", time.monotonic())
        elif self._handle is None or select.select([self._handle], [], [], 0)[0]:
            end = End(EndKind.KILLED, 1, "was killed, or has exited", time.monotonic())
            self.ended = self.reported or while_reading(end, self.beat.reading())

    def kill_hung(self, end: End) -> None:
        self.reported = end
        print_on_stderr(f"lockstep: {end.text}; it is killed")
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _watch(watch: HangWatch, ranks: Sequence[_OutsideRank], deadly: DeadlySamples | None) -> None:
    while any(rank.ended is None for rank in ranks):
        watch.look(ranks)
        time.sleep(_TICK_S)
        for rank in ranks:
            rank.update()
        ends = [rank.ended or _RUNS for rank in ranks]
        if deadly is not None and any(end.kind is not EndKind.DONE for end in ends):
            if (verdict := deadly.after(ends, watch.first)) is not None:
                print_on_stderr(f"lockstep: {verdict.left_out or verdict.advice}")
            deadly = None  # how the others end is up to their launcher


def _all_begun(beats: Sequence[Heartbeat]) -> bool:
    """Wait until all ranks of this host have begun; return whether they have."""
    until = time.monotonic() + _COMES_S
    while not all(beat.numbers[PROCESS] for beat in beats):
        if time.monotonic() > until or not os.path.exists(f"/proc/{int(beats[0].numbers[PROCESS])}"):
            return False
        time.sleep(_TICK_S)
    return True


def main(task: str) -> None:
    """Watch the ranks that a task names, until the last of them has ended."""
    from lockstep.config.training_sections import Watchdog

    values = json.loads(task)
    folder, logs = Path(values["folder"]), values["logs"]
    try:
        beats = mapped_heartbeats(folder, values["ranks"])
        if _all_begun(beats):
            options, logs = Watchdog(**values["options"]), None if logs is None else Path(logs)
            watch = HangWatch(options, beats, logs, values["first"], alone=values["alone"])
            deadly = None if logs is None else DeadlySamples(logs, *values["deadly"])
            _watch(watch, [_OutsideRank(beat) for beat in beats], deadly)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
