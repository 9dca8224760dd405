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
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core import heartbeat
from lockstep.core.heartbeat import PROCESS, READY, Heartbeat, mapped_heartbeats
from lockstep.core.processes import started
from lockstep.core.ranks import RankEnvironment, names_a_rank, started_by_lockstep
from lockstep.core.stopping import STACKS_SIGNAL, STOP_SIGNALS
from lockstep.launch.deadly_samples import DeadlySamples
from lockstep.launch.ends import End, EndKind, while_reading
from lockstep.launch.flight_records import answer_no_more, answer_requests
from lockstep.launch.hang_watch import HangWatch, LearnedTimes
from lockstep.launch.kept_times import keep, remove_without, take, times_folder
from lockstep.launch.memory_folder import ROOT, is_own, prefix, remove_abandoned
from lockstep.launch.outcome import print_on_stderr

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_TICK_S = 0.1
_COMES_S = 600.0  # until all ranks of the host have begun
_LEAVES_S = 1.0  # the thread that writes flight records
_LEFT = -1.0  # instead of its process: the rank has left
_RUNS = End(EndKind.DONE, 0, "", 0.0)
_NOTES = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_MOST_SIGNALS = 2**16
_openings = count()
_noted: list[int] = []  # the file into which this rank's signals are noted


@contextlib.contextmanager
def watched_from_outside(config: Config, logs: Path | None) -> Iterator[None]:
    """Watch this rank and the others of its host while the block runs, unless Lockstep's launcher does.

    Args:
        logs: Of the run, for the stacks of a rank that hangs, and the samples whose reading ends one.
    """
    environ, options = os.environ, config.recovery.watchdog
    folder, opening = None, next(_openings)
    if options.enabled and names_a_rank(environ) and not started_by_lockstep(environ):
        folder = _shared_folder(opening)
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
    answers = answer_requests(own)
    own.numbers[READY], own.numbers[PROCESS] = 1, os.getpid()
    heartbeat.use(own)
    if rank.local_rank == 0:
        _start(folder, config, logs, rank, opening)
    try:
        with _noting_signals(folder, rank.local_rank):
            yield
    finally:
        own.numbers[PROCESS] = _LEFT
        answer_no_more(own)
        heartbeat.use(before)
        faulthandler.register(STACKS_SIGNAL, file=_nowhere())  # which else ends a process
        answers.join(_LEAVES_S)
        if not answers.is_alive():
            own.close()


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


@contextlib.contextmanager
def _noting_signals(folder: Path, place: int) -> Iterator[None]:
    """Note in a file which signals this rank handles, in C, also while its interpreter's lock is held."""
    handle = os.open(_signals_file(folder, place), _NOTES | os.O_NONBLOCK, 0o600)
    try:
        with contextlib.suppress(ValueError):  # not in the main thread
            before = signal.set_wakeup_fd(handle, warn_on_full_buffer=False)
            if before == -1:
                _noted.append(handle)
            else:  # another's, such as asyncio's
                signal.set_wakeup_fd(before)
        yield
    finally:
        _note_none()
        os.close(handle)


def _note_none() -> None:
    """Note no more signals. Those of a process that a rank forks aren't its own."""
    if _noted:
        _noted.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


def _signals_file(folder: Path, place: int) -> Path:
    return folder / f"signals-{place}"


def _shared_folder(opening: int) -> Path | None:
    """Return the folder of the ranks that this rank's launcher has started on this host, at this opening."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    launcher, port = os.getppid(), os.environ.get("MASTER_PORT", "")
    path = ROOT / f"{prefix()}watch-{launcher}-{started(launcher)}-{port}-{restarts}-{opening}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return path if is_own(path) else None
    except OSError:
        return None


def _start(folder: Path, config: Config, logs: Path | None, rank: RankEnvironment, opening: int) -> None:
    times, goes_on = times_folder(opening)
    deadly = None if logs is None else DeadlySamples.of(config, logs)
    task = {
        "folder": str(folder),
        "options": config.recovery.watchdog.model_dump(),
        "logs": None if logs is None else str(logs),
        "deadly": None if deadly is None else (deadly.data, deadly.skips, dict(deadly.evaluation)),
        "ranks": rank.local_world_size,
        "first": rank.rank,
        "alone": rank.local_world_size == rank.world_size,
        "times": None if times is None else str(times),
        "goes_on": goes_on,
        "launcher": os.getppid(),
    }
    with contextlib.suppress(OSError):  # the ranks train without it
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the launcher's signals are the ranks'
        )


os.register_at_fork(after_in_child=_note_none)


# --- in the process beside the ranks --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KnownProcess:
    pid: int


@dataclass
class _OutsideRank:
    """A rank, as the watch sees it: nothing is known of how it ends."""

    beat: Heartbeat
    signals: int  # the file of those that it has handled
    process: _KnownProcess = field(init=False)
    reported: End | None = None
    ended: End | None = None
    _handle: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.process = _KnownProcess(int(self.beat.numbers[PROCESS]))
        if self.process.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                self._handle = os.pidfd_open(self.process.pid)

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.ended.kind is not EndKind.DONE

    def update(self) -> None:
        """Note whether the process has ended, or has left the others."""
        if self.beat.numbers[PROCESS] == _LEFT:
            self.ended = End(EndKind.DONE, 0, "", time.monotonic())
        elif self._handle is None or select.select([self._handle], [], [], 0)[0]:
            kind = EndKind.INTERRUPTED if self._was_stopped() else EndKind.KILLED
            end = End(kind, 1, "was killed, or has exited", time.monotonic())
            self.ended = self.reported or while_reading(end, self.beat.reading())

    def _was_stopped(self) -> bool:
        """Return whether a stop was requested: its launcher kills a rank that doesn't follow, whatever it reads."""
        return not {*STOP_SIGNALS}.isdisjoint(os.pread(self.signals, _MOST_SIGNALS, 0))

    def kill_hung(self, end: End) -> None:
        self.reported = end
        print_on_stderr(f"lockstep: {end.text}; process {self.process.pid} is killed")
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _watch(watch: HangWatch, ranks: Sequence[_OutsideRank], deadly: DeadlySamples | None) -> None:
    while any(rank.ended is None for rank in ranks):
        watch.look(ranks)
        watch.rest()
        time.sleep(_TICK_S)
        for rank in ranks:
            rank.update()
        ends = [rank.ended or _RUNS for rank in ranks]
        if deadly is not None and any(end.kind is not EndKind.DONE for end in ends):
            if (verdict := deadly.after(ends, watch.first)) is not None:
                print_on_stderr(f"lockstep: {verdict.left_out or verdict.advice}")
            deadly = None  # how the others end is up to their launcher


def _all_begun(beats: Sequence[Heartbeat]) -> bool:
    """Wait until all ranks of this host have begun, not only those that ran in this folder before; return whether."""
    until = time.monotonic() + _COMES_S
    while not all(started(int(beat.numbers[PROCESS])) for beat in beats):
        if time.monotonic() > until or not started(int(beats[0].numbers[PROCESS])):
            return False
        time.sleep(_TICK_S)
    return True


def main(task: str) -> None:
    """Watch the ranks that a task names, until the last of them has ended."""
    from lockstep.config.training_sections import Watchdog

    values = json.loads(task)
    folder, logs = Path(values["folder"]), values["logs"]
    try:
        remove_abandoned()
        beats = mapped_heartbeats(folder, values["ranks"])
        if _all_begun(beats):
            options, logs = Watchdog(**values["options"]), None if logs is None else Path(logs)
            kept, run = None if values["times"] is None else Path(values["times"]), str(logs)
            times = LearnedTimes() if kept is None else take(kept, run)
            watch = HangWatch(options, beats, logs, values["first"], alone=values["alone"], times=times)
            deadly = None if logs is None else DeadlySamples(logs, *values["deadly"])
            signals = [os.open(_signals_file(folder, place), _NOTES, 0o600) for place in range(len(beats))]
            ranks = [*map(_OutsideRank, beats, signals)]
            _watch(watch, ranks, deadly)
            if kept is not None and values["goes_on"] and any(rank.failed for rank in ranks):
                keep(kept, run, times)
                remove_without(values["launcher"], kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
