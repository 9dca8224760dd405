"""The watch over ranks that another launcher has started (torchrun, srun): a process beside them, one on each host.

    a rank of the host   --> makes a folder in /dev/shm, and starts it, when the ranks have joined
    all ranks of it      --> write their heartbeats into files there
    the process          --> names a rank that hangs, on rank 0's stderr, and kills it, so that the launcher notices
                             ends with the last rank

A thread of a rank could do neither, while that rank holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core import heartbeat
from lockstep.core.errors import named_ranks
from lockstep.core.heartbeat import PROCESS, READY, Heartbeat, mapped_heartbeats
from lockstep.core.processes import machine, started
from lockstep.core.ranks import RankEnvironment, names_a_rank, started_by_lockstep
from lockstep.core.stopping import STOP_SIGNALS
from lockstep.launch.ends import End, EndKind, first_cause, while_reading
from lockstep.launch.failure_kinds import advice_on_samples
from lockstep.launch.flight_records import answer_no_more, answer_requests
from lockstep.launch.hang_watch import HangWatch
from lockstep.launch.memory_folder import ROOT, is_own, prefix, remove_abandoned
from lockstep.launch.outcome import print_on_stderr
from lockstep.launch.rank_stacks import answer_signal

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Control

_TICK_S = 0.1
_COMES_S = 600.0  # until all ranks of the host have begun
_LEAVES_S = 1.0  # the thread that writes flight records
_LEFT = -1.0  # instead of its process: the rank has left
_RUNS = End(EndKind.DONE, 0, "", 0.0)
_NOTES = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_MOST_SIGNALS = 2**16
_noted: list[int] = []  # the file into which this rank's signals are noted


@contextlib.contextmanager
def watched_from_outside(config: Config, logs: Path | None) -> Iterator[Callable[[Control], None]]:
    """Yield a function that lets this rank and the others of its host be watched until the block ends.

    All ranks call it together, when they have joined. It does nothing under Lockstep's launcher, which watches them.

    Args:
        logs: Of the run, for the stacks of a rank that hangs, and the samples whose reading ends one.
    """
    with contextlib.ExitStack() as until_end:

        def watch(ranks: Control) -> None:
            if not names_a_rank(os.environ) or started_by_lockstep(os.environ):
                return
            if (host := _host_of(ranks, makes=config.recovery.watchdog.enabled)) is not None:
                until_end.enter_context(_watched(config, logs, host))

        yield watch


@contextlib.contextmanager
def _watched(config: Config, logs: Path | None, host: _Host) -> Iterator[None]:
    beats, before = mapped_heartbeats(host.folder, len(host.ranks)), heartbeat.own()
    own = beats.pop(host.place)
    for beat in beats:
        beat.close()
    own.numbers[:] = before.numbers
    answer_signal(own.files.stacks)
    answers = answer_requests(own)
    own.numbers[READY], own.numbers[PROCESS] = 1, os.getpid()
    heartbeat.use(own)
    process = _start(host, config, logs) if host.is_maker else None
    try:
        with _noting_signals(host.folder, host.place):
            yield
    finally:
        own.numbers[PROCESS] = _LEFT
        answer_no_more(own)
        heartbeat.use(before)
        answer_signal(_nowhere())  # which else ends a process
        answers.join(_LEAVES_S)
        if not answers.is_alive():
            own.close()
        if host.is_maker and (process is None or process.poll() is not None):  # else it is removed by the process
            shutil.rmtree(host.folder, ignore_errors=True)


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


@dataclass(frozen=True, slots=True)
class _Host:
    """The ranks of a host, and this rank's place among them.

    Attributes:
        folder: For their heartbeats.
        world_size: The number of ranks of all hosts.
        is_maker: Whether this rank has made the folder.
    """

    folder: Path
    ranks: Sequence[int]
    place: int
    world_size: int
    is_maker: bool


def _host_of(ranks: Control, *, makes: bool) -> _Host | None:
    """Return the ranks that run on this host; None: they aren't watched. All ranks together.

    Args:
        makes: Whether a folder is made.
    """
    here, made = machine(), None
    if makes and RankEnvironment.read(os.environ).local_rank == 0:
        made = _new_folder()
    folder: Path | None = None
    try:
        places = cast("list[tuple[str, Path | None]]", ranks.gather((here, made)))
        neighbors = [rank for rank, (place, _) in enumerate(places) if place == here]
        folder = next((path for rank in neighbors if (path := places[rank][1]) is not None), None)
        if folder is None or not _is_there(folder):
            return None
        return _Host(folder, neighbors, neighbors.index(ranks.rank), ranks.size, folder == made)
    finally:
        if made is not None and folder != made:  # another launcher's rank on this host has made one, too
            with contextlib.suppress(OSError):
                made.rmdir()


def _new_folder() -> Path | None:
    path = ROOT / f"{prefix()}watch-{uuid.uuid4().hex}"
    try:
        path.mkdir(mode=0o700)
    except OSError:
        return None
    return path


def _is_there(folder: Path) -> bool:
    try:
        return is_own(folder)
    except OSError:
        return False


def _start(host: _Host, config: Config, logs: Path | None) -> subprocess.Popen[bytes] | None:
    task = {
        "folder": str(host.folder),
        "options": config.recovery.watchdog.model_dump(),
        "logs": None if logs is None else str(logs),
        "ranks": len(host.ranks),
        "first": host.ranks[0],
        "alone": len(host.ranks) == host.world_size,
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the launcher's signals are the ranks'
        )
    except OSError as error:
        print_on_stderr(f"lockstep: {named_ranks(host.ranks)} can't be watched for hangs: {error.strerror or error}")
        return None


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


def _watch(watch: HangWatch, ranks: Sequence[_OutsideRank]) -> None:
    is_first = True
    while any(rank.ended is None for rank in ranks):
        watch.look(ranks)
        watch.rest()
        time.sleep(_TICK_S)
        for rank in ranks:
            rank.update()
        ends = [rank.ended or _RUNS for rank in ranks]
        if is_first and (cause := first_cause(ends)) is not None:
            is_first = False  # how the others end is up to their launcher
            if advice := advice_on_samples(ends[cause]):
                print_on_stderr(f"lockstep: rank {watch.first + cause} has ended while it read a sample: {advice}")


def _all_begun(beats: Sequence[Heartbeat], first: int) -> bool:
    """Wait until all ranks of this host write their heartbeats; return whether they do.

    Args:
        first: The first of them among all.
    """
    until = time.monotonic() + _COMES_S
    while missing := [first + place for place, beat in enumerate(beats) if not beat.numbers[PROCESS]]:
        if not started(int(beats[0].numbers[PROCESS])):
            return False
        if time.monotonic() > until:
            why = f"{named_ranks(missing)} didn't begin within {_COMES_S:g} s"
            print_on_stderr(f"lockstep: the ranks of this host aren't watched for hangs: {why}")
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
        if _all_begun(beats, values["first"]):
            options, logs = Watchdog(**values["options"]), None if logs is None else Path(logs)
            watch = HangWatch(options, beats, logs, values["first"], alone=values["alone"])
            signals = [os.open(_signals_file(folder, place), _NOTES, 0o600) for place in range(len(beats))]
            ranks = [*map(_OutsideRank, beats, signals)]
            _watch(watch, ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
