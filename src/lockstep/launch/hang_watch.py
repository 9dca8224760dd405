"""Finds ranks that hang: each tick, the launcher reads the heartbeats of its ranks.

    each rank's last mark: long ago?      --> longer than max(least, steps x median update)
    all others wait in a collective?      --> their stacks agree?  --> report the rank: line, samples
    not moved until `end_after`           --> kill it, and start all ranks again
    it is stopped, and others aren't      --> SIGCONT when it is reported

Time doesn't count while the launcher itself is stopped.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.core import heartbeat
from lockstep.core.errors import named_ranks
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.files import append_line, write_atomically
from lockstep.core.heartbeat import Heartbeat, Reading, Stage, Worker
from lockstep.core.phase_clock import Phase
from lockstep.core.processes import state
from lockstep.core.secrets import shareable
from lockstep.launch.ends import End, with_reading
from lockstep.launch.outcome import print_on_stderr
from lockstep.launch.rank_stacks import (
    FlightRecord,
    Frame,
    compiles,
    flight_records,
    is_debugged,
    line_of,
    main_frames,
    waits_for_accelerator,
    waits_in_collective,
    write_stacks,
)

if TYPE_CHECKING:
    from lockstep.config.training_sections import Watchdog

REPORT = "hangs.txt"
_RECORDS = "flight_record"
_NO_STACK = "no stack: it is stopped, or the kernel doesn't interrupt it"
_PLACES = {
    Phase.HOST: "between two updates",
    Phase.DATA: "fetching data",
    Phase.FORWARD: "in the forward",
    Phase.BACKWARD: "in the backward",
    Phase.COMMUNICATION: "in a collective",
    Phase.OPTIMIZER: "in the optimizer's step",
    Phase.SAVE: "in a save",
    Phase.EVALUATION: "in an evaluation",
}
_GAP_S = 1.0  # from a rest to the next look: this process didn't run
_TICK_S, _TICKS = 0.25, 8  # between two looks, at most; looks within the least limit, at least
_EARLIER = 2.0  # looks before its limit, to report a rank in time, with its stack
_NOTED = 64  # updates
_SLOWEST = 2.0  # times the slowest of the last updates
_AGAIN, _LONG = 2.0, 4.0  # times the limit until a rank is killed; the same outside of updates, such as in a save
_ELSEWHERE_S = 10.0  # until a wait of all ranks of this host for other hosts' is reported
_OUTSIDE = (Phase.EVALUATION, Phase.SAVE)


@dataclass(frozen=True, slots=True)
class Sight:
    """A rank at a moment, before stacks are requested: that signal ends a wait in the kernel, such as sleep().

    Attributes:
        place: Its number on this host.
        mark, age: Time of its last mark, and the seconds since then that count.
        waits: Whether it is in a collective.
        state: The kernel's letter for the state of its process, if it hasn't moved for a while.
        updates, calls: Updates of this process that have ended; collectives that it has called.
        worker: The first data worker that reads, if it may wait for one.
        limit: Seconds without a move until it is reported.
    """

    rank: int
    place: int
    process: int
    mark: float
    age: float
    phase: Phase
    stage: Stage
    waits: bool
    state: str
    step: int
    updates: int
    calls: int
    reading: Reading | None = None
    worker: Worker | None = None
    limit: float = 0.0

    @property
    def is_outside_training(self) -> bool:
        return self.stage is not Stage.TRAINING and (self.stage is not Stage.UNKNOWN or self.phase is Phase.HOST)

    @property
    def where(self) -> str:
        """The place in its run, as text."""
        if self.stage in (Stage.START, Stage.END):
            return "at the start of the run" if self.stage is Stage.START else "at the end of the run"
        return _PLACES[Phase.DATA if self.phase is Phase.HOST and (self.reading or self.worker) else self.phase]


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that hang; none if all ranks of this host wait for other hosts' ranks.

    Stacks are by process, flight records by rank; `collectives` is what the ranks wait in, if all do.
    """

    culprits: tuple[Sight, ...]
    stacks: Mapping[int, str]
    records: Mapping[int, FlightRecord]
    is_stopped: bool = False
    collectives: str = ""

    def frames_of(self, process: int) -> list[Frame]:
        return main_frames(self.stacks.get(process, ""))


def hang_text(hang: Hang) -> str:
    """Return the message about ranks that hang: what they do, and where."""
    if hang.collectives:
        where = "collectives that don't match" if hang.culprits else "collectives, for other hosts"
        return f"the ranks wait in {where}: {hang.collectives}"
    culprit = hang.culprits[0]
    frames = hang.frames_of(culprit.process)
    line = line_of(frames)
    at = f" at {line}" if line is not None else ""
    if waits_for_accelerator(frames):
        at = f", and waits for its accelerator{at}"
    update = f"update {culprit.step:,}" if culprit.stage not in (Stage.START, Stage.END) else ""
    details = ", ".join(filter(None, (update, _read_by(culprit, hang))))
    names = named_ranks([each.rank for each in hang.culprits])
    how = f"hang{'s' * (len(hang.culprits) == 1)}{', stopped by SIGSTOP,' if hang.is_stopped else ''}"
    return f"{names} {how} {culprit.where}{at}{f' ({details})' if details else ''}"


def collectives_of(sights: Sequence[Sight], stacks: Mapping[int, str], records: Mapping[int, FlightRecord]) -> str:
    """Return the ranks that wait in each collective, and the line that called it, as text."""
    ranks: dict[str, list[int]] = {}
    for sight in sights:
        line = line_of(main_frames(stacks.get(sight.process, "")))
        at = f" at {line}" if line is not None else ""
        ranks.setdefault(f"{pending_of(sight, records)}{at}", []).append(sight.rank)
    return "; ".join(f"{named_ranks(each)} in {text}" for text, each in ranks.items())


def pending_of(sight: Sight, records: Mapping[int, FlightRecord]) -> str:
    """Return the first collective of a rank that isn't complete."""
    record = records.get(sight.rank)
    return record.pending[0] if record is not None and record.pending else "a collective"


def append_report(logs: Path | None, hang: Hang, sights: Sequence[Sight]) -> str:
    """Append the stacks of all ranks to the run's report; return the end of a message about it."""
    if logs is None:
        return ""
    lines = [f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {hang_text(hang)}", ""]
    for sight in sights:
        doing = f"{sight.where}, update {sight.step:,}, for {sight.age:.1f} s; {sight.calls} collectives called"
        record = hang.records.get(sight.rank, FlightRecord())
        doing += f"; not complete: {'; '.join(record.pending)}" if record.pending else ""
        lines.append(f"--- rank {sight.rank}, process {sight.process}, state {sight.state or '?'}: {doing}")
        threads = [hang.stacks.get(sight.process) or _NO_STACK, record.threads]
        lines += [shareable("\n\n".join(filter(None, threads))), ""]
        if (worker := sight.worker) is not None:
            name = f"--- data worker {worker.number} of rank {sight.rank}, process {worker.process}"
            lines += [f"{name}: {worker.reading}", shareable(hang.stacks.get(worker.process, "")), ""]
    with suppress(OSError):
        append_line(logs / REPORT, "\n".join(lines))
        _save_records(logs / _RECORDS, hang.records, sights)
        return f"; stacks: {logs / REPORT}"
    return ""


def _save_records(folder: Path, records: Mapping[int, FlightRecord], sights: Sequence[Sight]) -> None:
    for sight in sights:
        (folder / f"rank_{sight.rank}").unlink(missing_ok=True)  # of an earlier hang
    for rank, record in records.items():
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"rank_{rank}", record.content, durable=False)


def _read_by(sight: Sight, hang: Hang) -> str:
    if sight.reading is not None or (worker := sight.worker) is None:
        return str(sight.reading or "")
    line = line_of(hang.frames_of(worker.process))
    return f"data worker {worker.number} reads {worker.reading}{f' at {line}' if line is not None else ''}"


@dataclass
class LearnedTimes:
    """The seconds of updates, over all rounds of a launch: of the slowest first one, and of the last others."""

    first: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_NOTED))


class ObservedRank(Protocol):
    """A rank's process: `ended` and `reported` are None until it has ended, or reported how it ends."""

    @property
    def process(self) -> Any: ...
    @property
    def reported(self) -> End | None: ...
    @property
    def ended(self) -> End | None: ...
    def kill_hung(self, end: End) -> None: ...


@dataclass
class _Incident:
    """Ranks that don't move: their marks, the age of the next check, and who was reported."""

    marks: set[tuple[int, float]]
    checked_at: float = 0.0
    named: tuple[Sight, ...] = ()


@dataclass
class HangWatch:
    """Watches the ranks of this host, from `first` on; `alone`: there are no other hosts."""

    options: Watchdog
    heartbeats: Sequence[Heartbeat]
    logs: Path | None
    first: int
    alone: bool
    times: LearnedTimes = field(default_factory=LearnedTimes)
    interval: float = field(init=False)
    _first_before: float = field(init=False)
    _looked: float = field(default_factory=time.perf_counter, init=False)
    _rested: float = field(default=math.inf, init=False)
    _resumed: float = field(default=0.0, init=False)
    _updates: dict[int, float] = field(default_factory=dict, init=False)
    _incident: _Incident | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.interval = min(_TICK_S, self.options.least / _TICKS)
        self._first_before = self.times.first

    @property
    def has_named(self) -> bool:
        """True while a reported rank doesn't move."""
        return self._incident is not None and bool(self._incident.named)

    def close(self) -> None:
        for beat in self.heartbeats:
            beat.close()

    def look(self, members: Sequence[ObservedRank]) -> None:
        """Check the ranks; report or kill one that hangs. If the watch fails, it ends, and the run doesn't."""
        try:
            now = time.perf_counter()
            if now - self._rested > _GAP_S:
                self._resumed = now
            if now - self._looked >= self.interval / 2:
                self._looked = now
                self._look(members, now)
        except Exception:
            self.interval = math.inf
            print_on_stderr(f"lockstep: the watch over ranks that hang has failed, and ends:\n{traceback.format_exc()}")
        self.rest()

    def rest(self) -> None:
        """Note that the launcher waits from now on. If it waits for longer than it has to, that time doesn't count."""
        self._rested = time.perf_counter()

    def _look(self, members: Sequence[ObservedRank], now: float) -> None:
        self._learn()
        ends = [member.reported or member.ended for member in members]
        living = [place for place, end in enumerate(ends) if end is None]
        if not living or any(end is not None and end.kind is not FailureKind.DONE for end in ends):
            return
        sights = [self._sight(place, members[place].process.pid or 0, now) for place in living]
        suspects = [sight for sight in sights if not sight.waits] or sights
        is_same = self._incident is not None and self._incident.marks <= _marks(suspects)
        if not all(map(self._is_overdue, suspects)) and not (is_same and self.has_named):
            suspects = []
        if not (is_same and suspects):
            self._end_incident(sights)
        if suspects:
            self._judge(suspects, sights, members)

    # --- what is seen ---

    def _learn(self) -> None:
        for place, beat in enumerate(self.heartbeats):
            updates = beat.numbers[heartbeat.UPDATES]
            if updates == self._updates.get(place, 0.0):
                continue
            self._updates[place] = updates
            self.times.first = max(self.times.first, beat.numbers[heartbeat.FIRST])
            if updates > 1:
                self.times.recent.append(beat.numbers[heartbeat.SECONDS])

    def _sight(self, place: int, process: int, now: float) -> Sight:
        beat = self.heartbeats[place]
        numbers = beat.numbers
        mark, phase = numbers[heartbeat.TIME], int(numbers[heartbeat.PHASE])
        in_whole = phase >= heartbeat.IN_WHOLE
        age = now - max(mark, self._resumed) if mark else 0.0
        name, updates = Phase(phase - heartbeat.IN_WHOLE * in_whole), int(numbers[heartbeat.UPDATES])
        letter = state(process) if age > self.interval else ""
        may_fetch = age > self.interval and name in (Phase.HOST, Phase.DATA, Phase.EVALUATION)
        sight = Sight(
            self.first + place, place, process, mark, age, name,
            stage=Stage(int(numbers[heartbeat.STAGE])),
            waits=letter != "T" and (in_whole or name is Phase.COMMUNICATION),
            state=letter,
            step=int(numbers[heartbeat.STEPS]) + updates + 1,
            updates=updates,
            calls=int(numbers[heartbeat.CALLS]),
            reading=beat.reading(),
            worker=next(iter(beat.workers()), None) if may_fetch else None,
        )  # fmt: skip
        return replace(sight, limit=self._limit(sight))

    def _limit(self, sight: Sight) -> float:
        options, times = self.options, self.times
        if self._is_outside(sight):
            return options.other
        limit = options.least
        if times.recent:
            limit = max(limit, options.steps * statistics.median(times.recent), _SLOWEST * max(times.recent))
        return limit if sight.updates and times.recent else max(limit, options.steps * times.first)

    def _is_outside(self, sight: Sight) -> bool:
        """Return whether the rank is outside of its updates, or in the first of the launch, which may compile."""
        is_first = not sight.updates and not self._first_before
        return sight.is_outside_training or is_first or sight.phase in _OUTSIDE

    def _is_overdue(self, sight: Sight) -> bool:
        return sight.age > sight.limit - _EARLIER * self.interval

    # --- the verdict ---

    def _judge(self, suspects: Sequence[Sight], sights: Sequence[Sight], members: Sequence[ObservedRank]) -> None:
        """Find out from the stacks which rank it is: name it, and kill it the next time."""
        age = max(sight.age for sight in suspects)
        incident = self._incident = self._incident or _Incident(_marks(suspects))
        if age < incident.checked_at:
            return
        incident.checked_at = 2 * age
        hang = self._verdict(suspects, sights)
        if hang is None or not (hang.collectives or all(map(self._is_overdue, hang.culprits))):
            incident.named = ()
        elif any(compiles(hang.frames_of(each.process)) for each in hang.culprits) and age < self.options.other:
            incident.checked_at = self.options.other
        elif not hang.culprits and age < (shown_at := max(_ELSEWHERE_S, *(sight.limit for sight in sights))):
            incident.checked_at = shown_at
        elif incident.named:
            self._kill(hang, sights, members)
        else:
            self._name(incident, hang, sights, age)

    def _verdict(self, suspects: Sequence[Sight], sights: Sequence[Sight]) -> Hang | None:
        """Return which rank hangs, by the stacks of all: none if all wait for other hosts. None: one is debugged."""
        if any(sight.state == "t" for sight in sights):
            return None
        beats = {sight.rank: self.heartbeats[sight.place] for sight in sights if sight.state != "T"}
        records = flight_records(beats)
        stacks = write_stacks({sight.process: beats[sight.rank] for sight in sights if sight.rank in beats})
        frames = {sight.rank: Hang((), stacks, records).frames_of(sight.process) for sight in sights}
        if any(map(is_debugged, frames.values())):
            return None
        readers = {each.worker.process: beats[each.rank] for each in sights if each.worker and each.rank in beats}
        stacks |= write_stacks({pid: beat for pid, beat in readers.items() if state(pid) not in ("", "T", "Z")})
        if stopped := tuple(sight for sight in suspects if sight.state == "T"):
            return Hang(stopped, stacks, records, is_stopped=True)
        idle = [sight for sight in sights if not waits_in_collective(frames[sight.rank], marked=sight.waits)]
        if not idle or (len(records) == len(sights) and all(record.on_device for record in records.values())):
            pending = [pending_of(sight, records) for sight in sights]
            odd = min(suspects, key=lambda each: (pending.count(pending_of(each, records)), each.calls, -each.rank))
            collectives = collectives_of(sights, stacks, records)
            return Hang((odd,) if self.alone else (), stacks, records, collectives=collectives)
        idle = [sight for sight in idle if sight in suspects] or idle
        behind = min((sight.updates, sight.calls) for sight in idle)
        return Hang(tuple(each for each in idle if (each.updates, each.calls) == behind), stacks, records)

    def _name(self, incident: _Incident, hang: Hang, sights: Sequence[Sight], age: float) -> None:
        ends_at = self._ends_at(hang)
        continues = hang.is_stopped and ends_at is not None and len(hang.culprits) < len(sights)
        incident.named, incident.checked_at = hang.culprits, math.inf if ends_at is None else ends_at
        follows = "" if ends_at is None else f"; the ranks are ended if that lasts {ends_at:.0f} s (recovery.watchdog)"
        follows = f"{'; it gets SIGCONT' if continues else follows}{append_report(self.logs, hang, sights)}"
        print_on_stderr(f"lockstep: {hang_text(hang)}: no move for {age:.1f} s{follows}")
        for culprit in hang.culprits if continues else ():
            os.kill(culprit.process, signal.SIGCONT)

    def _ends_at(self, hang: Hang) -> float | None:
        """Return after how many seconds without a move the rank is killed; None: never."""
        options, culprits = self.options, hang.culprits
        if not culprits or options.end_after is None:
            return None
        limit = max(each.limit for each in culprits)
        if all(each.is_outside_training for each in culprits):
            return None if options.end_start_after is None else max(options.end_start_after, _AGAIN * limit)
        seconds = max(options.end_after, (_LONG if all(map(self._is_outside, culprits)) else _AGAIN) * limit)
        is_late = max(each.age for each in culprits) > seconds  # a compilation, reported later than its limit
        return seconds + max(each.age for each in culprits) if is_late else seconds

    def _kill(self, hang: Hang, sights: Sequence[Sight], members: Sequence[ObservedRank]) -> None:
        text = f"{hang_text(hang)}{append_report(self.logs, hang, sights)}"
        for culprit in hang.culprits:
            reading = culprit.reading or (culprit.worker.reading if culprit.worker is not None else None)
            end = End(FailureKind.HUNG, text, time.monotonic())
            is_known = not hang.is_stopped and not hang.collectives
            members[culprit.place].kill_hung(with_reading(end, reading if is_known else None))

    def _end_incident(self, sights: Sequence[Sight]) -> None:
        incident, self._incident = self._incident, None
        for sight in incident.named if incident is not None else ():
            if (sight.rank, sight.mark) not in _marks(sights):
                seconds = time.perf_counter() - sight.mark
                print_on_stderr(f"lockstep: rank {sight.rank} moves again, after {seconds:.1f} s")


def _marks(sights: Sequence[Sight]) -> set[tuple[int, float]]:
    return {(sight.rank, sight.mark) for sight in sights}
