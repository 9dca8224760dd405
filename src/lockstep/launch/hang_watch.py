"""Finds ranks that hang: each tick, the launcher reads the heartbeats of its ranks.

    each rank's last mark: long ago?      --> longer than max(least, steps x median update)
    all others wait in a collective?      --> their stacks agree?  --> the rank is named: line, samples
    not moved until `end_after`           --> it is killed, and all ranks start again
    it is stopped, and others aren't      --> continued (SIGCONT); the second time, killed at once

A rank is named for what is certain: it doesn't move, and the others wait for it. Time doesn't count in which the
launcher itself didn't run (the whole job was stopped, the host was suspended), or the rank was ready to run and had no
processor.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lockstep.core import heartbeat
from lockstep.core.heartbeat import Heartbeat, Stage
from lockstep.core.phase_clock import Phase
from lockstep.launch.ends import End, EndKind, with_reading
from lockstep.launch.hang_report import Hang, Sight, Wait, append_report, hang_text, name_text, wait_text, work_of
from lockstep.launch.hang_verdict import odd_one, suspected, verdict
from lockstep.launch.host_waits import HostWaits
from lockstep.launch.outcome import print_on_stderr
from lockstep.launch.rank_stacks import (
    compiles,
    main_frames,
    process_state,
    seconds_without_processor,
)

if TYPE_CHECKING:
    from lockstep.config.training_sections import Watchdog

_GAP_S = 1.0  # from a rest to the next look: this process didn't run
_MOST_GAPS = 64
_LOADED_S = 0.5  # after which waits for a processor are subtracted
_TICK_S, _TICKS = 0.25, 8  # between two looks, at most; looks within the least limit, at least
_EARLIER = 2.0  # looks before its limit, so that a rank is named within it, with its stack
_MOVES = 0.25  # of the least limit: a rank with a mark as new moves
_NOTED = 64  # updates
_FIRST = 5  # updates of a process that may be slow
_UNSEEN_S = 1.0  # of a first update whose time wasn't seen
_SLOWEST = 2.0  # times the slowest of the last updates
_AGAIN = 2.0  # times the limit until a rank is killed; of one that moved again by itself, times that time
_LONG = 4.0  # times the limit of what may take long, such as a save, until it is killed
_DEADLOCK_S = 5.0  # after which the stacks of ranks are looked at that may wait without a mark
_ELSEWHERE_S = 10.0  # after which a wait of all ranks of this host for those of others is reported
_CODE = 124  # of timeout(1)
_OUTSIDE = (Phase.EVALUATION, Phase.SAVE)
_ALLOCATES_S = 10.0  # for which a first snapshot may allocate memory until it is named, at least
_IN_UPDATES = {Stage.TRAINING, Stage.SNAPSHOT, Stage.FIRST_SNAPSHOT}


class CountedTime:
    """The ages of the marks of ranks, without the time that doesn't count.

        look   rest --- wait --> look   rest --------- stopped ---------> look
                      counts                   a gap: doesn't count

    The launcher didn't run if it slept longer than it had to. A rank's wait for a processor doesn't count either.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rested = clock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MOST_GAPS)
        self._waited: dict[int, tuple[float, float]] = {}  # for a processor, by place: mark, seconds
        self._stopped: dict[int, float] = {}  # when it was first seen so, by place

    def rest(self) -> None:
        """Note that the launcher begins to wait for what comes next."""
        self._rested = self._clock()

    def look(self) -> float:
        """Note that the launcher looks at the ranks; return the time."""
        now = self._clock()
        if now - self._rested > _GAP_S:
            self._gaps.append((self._rested, now))
        self._rested = now
        return now

    def age(self, place: int, process: int, mark: float, now: float) -> float:
        """Return the seconds since a rank's mark that count."""
        age = self._since(mark, now)
        if age > _LOADED_S:
            age -= self._without_processor(place, process, mark)
        return max(0.0, age)

    def stopped(self, place: int, now: float, *, is_stopped: bool) -> float:
        """Return the seconds that count for which a rank has been seen stopped (SIGSTOP), until now."""
        if is_stopped:
            return self._since(self._stopped.setdefault(place, now), now)
        self._stopped.pop(place, None)
        return 0.0

    def _since(self, moment: float, now: float) -> float:
        return now - moment - sum(max(0.0, end - max(start, moment)) for start, end in self._gaps)

    def _without_processor(self, place: int, process: int, mark: float) -> float:
        seconds = seconds_without_processor(process)
        then = self._waited.get(place)
        if then is None or then[0] != mark:
            self._waited[place] = mark, seconds
            return 0.0
        return seconds - then[1]


@dataclass
class LearnedTimes:
    """The seconds of updates, over all rounds of a launch."""

    first: float = 0.0
    slowest_start: float = 0.0  # of the updates after the first
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_NOTED))


def hang_watch(
    options: Watchdog | None,
    ranks: int,
    logs: Path | None,
    first: int,
    *,
    alone: bool,
    times: LearnedTimes | None = None,
    others: HostWaits | None = None,
) -> HangWatch | None:
    """Return the watch over the ranks of this host; None: they aren't watched.

    Args:
        first: The first of them among all.
        alone: Whether there are no other hosts.
        times: What the rounds before have learned.
        others: What the launchers of other hosts report; None: nothing is known of them.
    """
    if options is None or not options.enabled:
        return None
    beats = heartbeat.heartbeats(ranks)
    return HangWatch(options, beats, logs, first, alone=alone, times=times or LearnedTimes(), others=others)


class ProcessOfRank(Protocol):
    """A process, of which the number counts."""

    @property
    def pid(self) -> int | None: ...


class ObservedRank(Protocol):
    """A rank's process: `ended` and `reported` are None until it has ended, or reported how it ends."""

    @property
    def process(self) -> ProcessOfRank: ...
    @property
    def reported(self) -> End | None: ...
    @property
    def ended(self) -> End | None: ...
    def kill_hung(self, end: End) -> None: ...


@dataclass
class _Incident:
    """A rank that doesn't move: which marks it had, the last stacks, and what was decided."""

    marks: set[tuple[int, float]]
    limit: float = 0.0
    stacks: Mapping[int, str] = field(default_factory=dict)
    hang: Hang | None = None
    ends_at: float | None = None


@dataclass
class HangWatch:
    """Watches the ranks of this host.

    Attributes:
        heartbeats: By place.
        interval: Seconds between two looks.
    """

    options: Watchdog
    heartbeats: Sequence[Heartbeat]
    logs: Path | None
    first: int
    alone: bool
    interval: float = _TICK_S
    times: LearnedTimes = field(default_factory=LearnedTimes)
    others: HostWaits | None = None
    _first_before: float = field(init=False)
    _looked: float = field(default_factory=time.perf_counter, init=False)
    _counted: CountedTime = field(default_factory=CountedTime, init=False)
    _updates: dict[int, float] = field(default_factory=dict, init=False)
    _moved_after: dict[Phase, float] = field(default_factory=dict, init=False)
    _continued: set[int] = field(default_factory=set, init=False)  # places of ranks that were stopped once
    _incident: _Incident | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Note the time that the rounds before took for their first updates; 0: there were none."""
        self.interval = min(self.interval, self.options.least / _TICKS)
        self._first_before = self.times.first

    @property
    def has_named(self) -> bool:
        """True while a rank that was named doesn't move."""
        return self._incident is not None and self._incident.hang is not None

    def close(self) -> None:
        for beat in self.heartbeats:
            beat.close()

    def look(self, members: Sequence[ObservedRank]) -> None:
        """Check the ranks; name or kill one that hangs. A watch that fails ends, and the run doesn't."""
        try:
            if time.perf_counter() - self._looked >= self.interval / 2:
                self._looked = now = self._counted.look()
                self._look(members, now)
        except Exception:
            self.interval = math.inf
            print_on_stderr(f"lockstep: the watch over ranks that hang has failed, and ends:\n{traceback.format_exc()}")
        self.rest()

    def rest(self) -> None:
        """Note that the launcher waits from now on. If it waits for longer than it has to, that time doesn't count."""
        self._counted.rest()

    def _look(self, members: Sequence[ObservedRank], now: float) -> None:
        self._learn()
        living = [place for place, member in enumerate(members) if member.ended is None and member.reported is None]
        failed = any(
            end.kind is not EndKind.DONE for member in members if (end := member.reported or member.ended) is not None
        )
        if failed or not living or (self._incident is None and all(self._moves(place, now) for place in living)):
            return
        sights = [self._sight(place, members[place].process.pid or 0, now) for place in living]
        suspects = suspected(sights, _EARLIER * self.interval)
        if not suspects and self._perhaps_deadlocked(sights):
            suspects = sights
        if self._incident is not None and not self._incident.marks <= _marks(suspects):
            self._end_incident(sights)
        if suspects:
            self._judge(suspects, sights, members)

    # --- what is seen ---

    def _learn(self) -> None:
        """Note how long updates take."""
        for place, beat in enumerate(self.heartbeats):
            updates, seconds = beat.numbers[heartbeat.UPDATES], beat.numbers[heartbeat.SECONDS]
            before = self._updates.get(place, 0.0)
            if updates == before:
                continue
            self._updates[place] = updates
            if not before:  # if others have followed since the last look, the first one's time isn't known any more
                self.times.first = max(self.times.first, seconds, 0.0 if updates == 1 else _UNSEEN_S)
            if 1 < updates < _FIRST:
                self.times.slowest_start = max(self.times.slowest_start, seconds)
            elif updates > 1:
                self.times.recent.append(seconds)

    def _moves(self, place: int, now: float) -> bool:
        mark = self.heartbeats[place].numbers[heartbeat.TIME]
        return not mark or now - mark < _MOVES * self.options.least

    def _sight(self, place: int, process: int, now: float) -> Sight:
        beat = self.heartbeats[place]
        numbers = beat.numbers
        mark, phase = numbers[heartbeat.TIME], int(numbers[heartbeat.PHASE])
        in_whole = phase >= heartbeat.IN_WHOLE
        age = self._counted.age(place, process, mark, now) if mark else 0.0
        name = Phase(phase - heartbeat.IN_WHOLE * in_whole)
        state = process_state(process) if age > self.interval else ""
        sight = Sight(
            self.first + place, place, process, mark, age, name, beat,
            waits=in_whole or name is Phase.COMMUNICATION,
            state=state,
            stopped=self._counted.stopped(place, now, is_stopped=state == "T"),
            stage=Stage(int(numbers[heartbeat.STAGE])),
            updates=int(numbers[heartbeat.UPDATES]),
            calls=int(numbers[heartbeat.CALLS]),
            work=work_of(beat, name),
        )  # fmt: skip
        return replace(sight, waits=sight.waits and state != "T", limit=self._limit(sight))

    def _limit(self, sight: Sight) -> float:
        """Return the seconds after which a rank that doesn't move is named."""
        options, times = self.options, self.times
        steps = max(options.least, options.steps * statistics.median(times.recent) if times.recent else 0.0)
        if sight.state == "T":
            return steps
        if self._may_take_long(sight):
            limit = options.other
            if sight.stage is Stage.FIRST_SNAPSHOT:  # allocates about as much as the first update
                limit = min(limit, max(steps, options.steps * times.first, _ALLOCATES_S))
        elif not sight.updates or len(times.recent) < _FIRST:
            known = max(times.slowest_start, *times.recent, 0.0) or times.first if sight.updates else self._first_before
            limit = max(steps, options.steps * known)
        else:
            limit = max(steps, _SLOWEST * max(times.recent))
        return max(limit, _AGAIN * self._moved_after.get(sight.phase, 0.0))

    def _may_take_long(self, sight: Sight) -> bool:
        """Return whether the rank is outside of its updates, or in the first of the launch, which may compile."""
        is_between = sight.stage is Stage.UNKNOWN and sight.phase is Phase.HOST  # a user's loop, which may evaluate
        is_in_updates = sight.stage in (Stage.UNKNOWN, Stage.TRAINING) and (sight.updates or self._first_before)
        return sight.stage is not Stage.SNAPSHOT and (not is_in_updates or is_between or sight.phase in _OUTSIDE)

    def _perhaps_deadlocked(self, sights: Sequence[Sight]) -> bool:
        """Return whether a rank waits in a collective, and the others may wait for it elsewhere, such as in a save."""
        is_overdue = any(sight.waits and sight.age > sight.limit for sight in sights)
        stages = {sight.stage for sight in sights}
        return self.alone and is_overdue and stages <= _IN_UPDATES and all(s.age > _DEADLOCK_S for s in sights)

    # --- the verdict ---

    def _judge(self, suspects: Sequence[Sight], sights: Sequence[Sight], members: Sequence[ObservedRank]) -> None:
        incident = self._incident
        if incident is None:
            self._incident = incident = _Incident(_marks(suspects))
            self._name(incident, suspects, sights)
        age = max(sight.age for sight in suspects)
        if incident.hang is None and self.others is not None and (waits := self.others.mismatched()):
            self._name_mismatch(incident, waits, sights)
        elif incident.hang is None:
            if age > incident.limit:  # a compilation that takes too long, or a debugger: look again
                incident.limit = 2 * age
                self._name(incident, suspects, sights)
        elif incident.ends_at is not None and age >= incident.ends_at:
            self._kill(incident, suspects, sights, members)

    def _name(self, incident: _Incident, suspects: Sequence[Sight], sights: Sequence[Sight]) -> None:
        """Find out from the stacks which rank it is; name it, unless it compiles or is debugged."""
        hang = verdict(suspects, sights, alone=self.alone)
        if hang is not None and not hang.culprits:
            self._report_wait(incident, hang, sights)
            return
        if hang is None or not all(
            each.age > each.limit - _EARLIER * self.interval or hang.waits for each in hang.culprits
        ):
            incident.limit = 2 * max(sight.age for sight in suspects)
            return
        limit = min(each.limit for each in sights) if hang.waits else max(each.limit for each in hang.culprits)
        compiling = any(compiles(main_frames(hang.stacks.get(each.process, ""))) for each in hang.culprits)
        if compiling and max(each.age for each in hang.culprits) < self.options.other:
            incident.limit = self.options.other
            return
        if hang.is_stopped and self.options.end_after is not None and len(hang.culprits) < len(sights):
            again = any(culprit.place in self._continued for culprit in hang.culprits)
            hang = replace(hang, continues=not again)
        incident.hang = hang
        incident.ends_at = self._ends_at(hang, len(sights), limit)
        if compiling and incident.ends_at is not None:  # it was named later than its limit
            incident.ends_at += max(each.age for each in hang.culprits)
        report = append_report(self.logs, hang, sights)
        print_on_stderr(name_text(hang, len(sights), incident.ends_at, report))
        for culprit in hang.culprits if hang.continues else ():
            self._continued.add(culprit.place)
            os.kill(culprit.process, signal.SIGCONT)

    def _report_wait(self, incident: _Incident, wait: Hang, sights: Sequence[Sight]) -> None:
        """Report that all ranks of this host wait for those of others, whose launchers name one that hangs.

        None does if the ranks have called collectives that don't match; the launchers then find the odd one together.
        """
        incident.stacks = wait.stacks
        if self.others is not None:
            self.others.report(wait.waits)
        limit = max(_ELSEWHERE_S, *(sight.limit for sight in sights))
        seconds = min(sight.age for sight in sights)
        if seconds < limit:
            incident.limit = limit
            return
        incident.limit = math.inf
        print_on_stderr(wait_text(wait, seconds, append_report(self.logs, wait, sights)))

    def _name_mismatch(self, incident: _Incident, waits: Sequence[Wait], sights: Sequence[Sight]) -> None:
        """Report that no rank of any host moves; the host of the odd one will kill it."""
        all_here = Hang(tuple(sights), incident.stacks, waits=tuple(waits))
        ends_at = self._ends_at(all_here, len(sights), min(sight.limit for sight in sights))
        odd = odd_one(waits).rank
        incident.hang = replace(all_here, culprits=tuple(sight for sight in sights if sight.rank == odd))
        incident.ends_at = ends_at if incident.hang.culprits else None
        print_on_stderr(name_text(all_here, len(sights), ends_at, append_report(self.logs, all_here, sights)))

    def _ends_at(self, hang: Hang, ranks: int, limit: float) -> float | None:
        """Return after how many seconds without a move the rank is killed; None: never."""
        in_updates = all(
            each.stage in _IN_UPDATES or (each.stage is Stage.UNKNOWN and each.phase is not Phase.HOST)
            for each in hang.culprits
        )
        if all(each.stage in (Stage.START, Stage.END) for each in hang.culprits) and not hang.is_stopped:
            seconds = self.options.end_start_after
            return None if seconds is None else max(seconds, 2 * limit)
        if self.options.end_after is None or not (in_updates or hang.is_stopped):
            return None
        if hang.is_stopped and not hang.continues and len(hang.culprits) < ranks:
            return 0.0
        if hang.is_stopped:  # it does nothing that takes long
            return max(self.options.end_after, _AGAIN * limit)
        if any(each.stage is Stage.FIRST_SNAPSHOT for each in hang.culprits):
            limit = max(limit, self.options.other)
        return max(self.options.end_after, (_LONG if all(map(self._may_take_long, hang.culprits)) else _AGAIN) * limit)

    def _kill(
        self, incident: _Incident, suspects: Sequence[Sight], sights: Sequence[Sight], members: Sequence[ObservedRank]
    ) -> None:
        before = incident.hang
        assert before is not None, "only a rank that was named is killed"
        hang = before if before.is_stopped else verdict(suspects, sights, alone=self.alone)
        if hang is not None and not hang.culprits and self.others is not None and self.others.mismatched():
            hang = replace(before, stacks=hang.stacks)
        if hang is None or not hang.culprits:  # a debugger is attached by now, or it waits for other hosts
            incident.hang, incident.ends_at, incident.limit = None, None, 2 * max(sight.age for sight in suspects)
            return
        report = append_report(self.logs, hang, sights)
        text = hang_text(hang, len(sights), report)
        for culprit in hang.culprits:
            reading = None if hang.is_stopped or hang.waits else culprit.work.reading
            members[culprit.place].kill_hung(with_reading(End(EndKind.HUNG, _CODE, text, time.monotonic()), reading))

    def _end_incident(self, sights: Sequence[Sight]) -> None:
        incident, self._incident = self._incident, None
        if self.others is not None:
            self.others.report(())
        if incident is None or incident.hang is None:
            return
        for culprit in incident.hang.culprits:
            if (culprit.rank, culprit.mark) not in _marks(sights):
                seconds = time.perf_counter() - culprit.mark
                self._moved_after[culprit.phase] = max(seconds, self._moved_after.get(culprit.phase, 0.0))
                print_on_stderr(f"lockstep: rank {culprit.rank} moves again, after {seconds:.1f} s")


def _marks(sights: Sequence[Sight]) -> set[tuple[int, float]]:
    return {(sight.rank, sight.mark) for sight in sights}
