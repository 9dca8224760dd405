"""The texts about a rank that hangs: a line for the terminal, and a report with all stacks for the run's folder.

rank 1 hangs in its forward at model.py:33 in forward (update 12, samples 311, 8, 47); the others wait for it
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lockstep.core import heartbeat
from lockstep.core.collective_names import NAMES
from lockstep.core.errors import named_ranks
from lockstep.core.files import append_line
from lockstep.core.heartbeat import Heartbeat, Reading, Stage, Worker, of_set
from lockstep.core.pending_collective import PendingCollective
from lockstep.core.phase_clock import Phase
from lockstep.core.secrets import shareable
from lockstep.launch.flight_records import FlightRecord, save_records
from lockstep.launch.rank_stacks import line_of, main_first, main_frames, waits_for_accelerator

REPORT = "hangs.txt"
_NO_STACK = "no stack: it is stopped, or the kernel doesn't interrupt it"
_MOST_SAMPLES = 8  # in a message
_PLACES = {
    Phase.HOST: "between two updates",
    Phase.DATA: "fetching data",
    Phase.FORWARD: "in its forward",
    Phase.BACKWARD: "in its backward",
    Phase.COMMUNICATION: "in a collective",
    Phase.OPTIMIZER: "in its optimizer's step",
    Phase.SAVE: "in a save",
    Phase.EVALUATION: "in an evaluation",
}


class Work(NamedTuple):
    """The work of a rank, noted before stacks are asked for: that signal ends a wait in the kernel, such as sleep().

    Attributes:
        fetches: Whether it fetches data.
        reading: What it reads, or waits for while a data worker reads it.
        is_own: Whether its own process reads a sample.
        worker: The data worker that it waits for.
        workers: All that fetch.
        samples: Of its micro-batch, as far as they are noted.
        number: How many there are.
    """

    fetches: bool = False
    reading: Reading | None = None
    is_own: bool = False
    worker: Worker | None = None
    workers: tuple[Worker, ...] = ()
    samples: tuple[int, ...] = ()
    number: int = 0


_NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Sight:
    """A rank at a moment.

    Attributes:
        mark: The time of its last mark.
        age: Seconds since then that count.
        waits: Whether it is in a collective.
        state: The kernel's letter for its process.
        stopped: Seconds for which that has been T, which count.
        updates, calls: Updates that it has made, and collectives that it has called, in this process.
        limit: Seconds after which it is named.
    """

    rank: int
    place: int
    process: int
    mark: float
    age: float
    phase: Phase
    beat: Heartbeat
    waits: bool
    state: str
    stage: Stage
    updates: int
    calls: int
    stopped: float = 0.0
    limit: float = 0.0
    work: Work = _NO_WORK

    @property
    def still(self) -> float:
        """The seconds since its last mark, also those that don't count."""
        return time.perf_counter() - self.mark

    @property
    def step(self) -> int:
        """The update of the run that it makes, from 1."""
        return _step(self.beat)

    @property
    def where(self) -> str:
        """The place in its run, as text."""
        if self.stage in (Stage.START, Stage.END):
            return "at the start of the run" if self.stage is Stage.START else "at the end of the run"
        if self.stage in (Stage.SNAPSHOT, Stage.FIRST_SNAPSHOT):
            return "in a snapshot in memory"
        return _PLACES[Phase.DATA if self.work.fetches else self.phase]


class Wait(NamedTuple):
    """A rank that waits in a collective.

    Attributes:
        operation: The collective's number, see `heartbeat.OPERATION`.
        calls: Collectives that it has called.
        text: The collective, and the line that called it.
        pending: The first that isn't complete, by its flight record; None: it isn't known.
    """

    rank: int
    operation: int
    calls: int
    text: str
    pending: PendingCollective | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that hang; none if all ranks of this host wait for those of other hosts.

    Attributes:
        stacks: By process, of all ranks of this host.
        records: By rank, of those of this host that have written one.
        is_stopped: Whether they are stopped (SIGSTOP).
        continues: Whether the launcher lets them continue.
        waits: What the ranks wait in, if all do; those of all hosts, if it is known.
    """

    culprits: tuple[Sight, ...]
    stacks: Mapping[int, str]
    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    is_stopped: bool = False
    continues: bool = False
    waits: tuple[Wait, ...] = ()

    @property
    def collectives(self) -> str:
        """The ranks that wait in each collective, as text."""
        ranks: dict[str, list[int]] = {}
        for wait in self.waits:
            ranks.setdefault(wait.text, []).append(wait.rank)
        return "; ".join(f"{named_ranks(each)} in {text}" for text, each in ranks.items())


def work_of(beat: Heartbeat, phase: Phase) -> Work:
    """Return what a rank in this phase works on."""
    fetches = phase is Phase.DATA or (phase is Phase.HOST and bool(beat.numbers[heartbeat.FETCHED]))
    workers = tuple(beat.workers())
    awaits = bool(workers) and (fetches or (phase is Phase.EVALUATION and workers[0].evaluation_set is not None))
    micro = int(beat.numbers[heartbeat.FETCHING if fetches else heartbeat.MICRO])
    has_samples = fetches or phase in (Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION)
    update = int(beat.numbers[heartbeat.FETCHED]) if fetches else _step(beat)
    samples, number = beat.samples(update - 1, micro) if has_samples else ([], 0)
    own = beat.reading()
    return Work(
        fetches,
        beat.waits_for(),
        bool(beat.numbers[heartbeat.SAMPLE]) or (own is not None and own.evaluation_set is not None),
        (beat.awaited()[1] or workers[0]) if awaits else None,
        workers,
        tuple(samples),
        number,
    )


def name_text(hang: Hang, ranks: int, ends_at: float | None, report: str) -> str:
    """Return the line that names a rank that doesn't move."""
    seconds = max(culprit.age for culprit in hang.culprits)
    if hang.continues:
        follows = f"; {_agreed(hang, 'it continues', 'they continue')} now (SIGCONT)"
    elif ends_at is None:
        follows = ""
    elif ends_at == 0:
        follows = f"; {_agreed(hang, 'it is', 'they are')} killed, and all ranks end"
    else:
        follows = f"; the ranks are ended if that lasts {ends_at:.0f} s (recovery.watchdog)"
    if hang.waits:
        return f"lockstep: no rank has moved for {seconds:.1f} s: {hang.collectives}{follows}{report}"
    if hang.is_stopped:
        verb = _agreed(hang, "is stopped", "are stopped")
    else:
        verb = f"{_agreed(hang, 'has', 'have')}n't moved for {seconds:.1f} s,"
    return f"lockstep: {_described(hang, verb)}{_waiting(hang, ranks)}{follows}{report}"


def hang_text(hang: Hang, ranks: int, report: str) -> str:
    """Return the message about a rank that was killed because it hung."""
    if not hang.culprits:
        return f"the ranks of this host wait for those of other hosts: {hang.collectives}{report}"
    if hang.waits:
        return f"the ranks wait in collectives that don't match: {hang.collectives}{report}"
    if not hang.is_stopped:
        verb = _agreed(hang, "hangs", "hang")
    elif hang.continues:
        verb = f"{_agreed(hang, 'is', 'are')} stopped (SIGSTOP), and let continue"
    else:
        verb = f"{_agreed(hang, 'was', 'were')} stopped (SIGSTOP), and killed"
    return f"{_described(hang, verb)}{_waiting(hang, ranks)}{report}"


def wait_text(hang: Hang, seconds: float, report: str) -> str:
    """Return the line about ranks that wait for those of other hosts."""
    return (
        f"lockstep: the ranks of this host have waited {seconds:.0f} s for those of other hosts: "
        f"{hang.collectives}{report}"
    )


def waits_of(
    sights: Sequence[Sight], stacks: Mapping[int, str], records: Mapping[int, FlightRecord]
) -> tuple[Wait, ...]:
    """Return which collective each rank waits in, and the line that called it."""
    waits = []
    for sight in sights:
        operation = int(sight.beat.numbers[heartbeat.OPERATION])
        name = NAMES[operation - 1] if operation else "a collective"
        if sight.phase in (Phase.SAVE, Phase.EVALUATION) and not sight.waits:
            name = "a wait for the others"
        record = records.get(sight.rank)
        pending = record.pending[0] if record is not None and record.pending else None
        line = line_of(main_frames(stacks.get(sight.process, "")))
        shown = name if pending is None else str(pending)
        text = f"{shown} at {line}" if line is not None else shown
        waits.append(Wait(sight.rank, operation, sight.calls, text, pending))
    return tuple(waits)


def are_recorded(waits: Sequence[Wait]) -> bool:
    """Return whether the flight records of all ranks have what they wait in."""
    return all(wait.pending is not None for wait in waits)


def append_report(logs: Path | None, hang: Hang, sights: Sequence[Sight]) -> str:
    """Append the stacks of all ranks to the run's report; return the end of a message that names it."""
    if logs is None:
        return ""
    save_records(logs, hang.records, max((sight.still for sight in sights if sight.mark), default=math.inf))
    lines = [f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {hang_text(hang, len(sights), '')}", ""]
    for sight in sights:
        doing = f"{sight.where}, update {sight.step:,}, for {sight.age:.1f} s; {sight.calls} collectives called"
        record = hang.records.get(sight.rank)
        if record is not None and record.pending:
            doing += f"; not complete: {'; '.join(map(str, record.pending))}"
        lines += [f"--- rank {sight.rank}, process {sight.process}, state {sight.state or '?'}: {doing}"]
        threads = [main_first(hang.stacks.get(sight.process, "")) or _NO_STACK, record.threads if record else ""]
        lines += [shareable("\n\n".join(filter(None, threads))), ""]
        for worker in sight.work.workers:
            lines += [
                f"--- data worker {worker.number} of rank {sight.rank}, process {worker.process}: {_sample_of(worker)}"
            ]
            lines += [shareable(main_first(hang.stacks.get(worker.process, ""))), ""]
    with suppress(OSError):
        append_line(logs / REPORT, "\n".join(lines))
        return f"; stacks: {logs / REPORT}"
    return ""


def _described(hang: Hang, verb: str) -> str:
    culprit = hang.culprits[0]
    frames = main_frames(hang.stacks.get(culprit.process, ""))
    line = line_of(frames)
    at = f" at {line}" if line is not None else ""
    if waits_for_accelerator(frames):
        at = f", and waits for its accelerator{at}"
    update = f"update {culprit.step:,}" if culprit.stage not in (Stage.START, Stage.END) else ""
    details = ", ".join(part for part in (update, _samples(culprit.work, hang.stacks)) if part)
    names = named_ranks([each.rank for each in hang.culprits])
    where = culprit.where.replace(" its ", _agreed(hang, " its ", " their "))
    return f"{names} {verb} {where}{at}{f' ({details})' if details else ''}"


def _agreed(hang: Hang, singular: str, plural: str) -> str:
    return singular if len(hang.culprits) == 1 else plural


def _samples(work: Work, stacks: Mapping[int, str]) -> str:
    """Return the samples that the rank works on; of a data worker that fetches, its own."""
    if (worker := work.worker) is not None:
        line = line_of(main_frames(stacks.get(worker.process, "")))
        return f"data worker {worker.number} reads {_sample_of(worker)}{f' at {line}' if line is not None else ''}"
    if work.is_own:
        return str(work.reading)
    if not work.samples:
        return ""
    more = f" and {work.number - _MOST_SAMPLES} more" if work.number > _MOST_SAMPLES else ""
    shown = ", ".join(map(str, work.samples[:_MOST_SAMPLES]))
    return f"sample{'s' * (work.number > 1)} {shown}{more}"


def _step(beat: Heartbeat) -> int:
    return int(beat.numbers[heartbeat.STEPS] + beat.numbers[heartbeat.UPDATES]) + 1


def _sample_of(worker: Worker) -> str:
    of = of_set(worker.evaluation_set)
    return f"sample {worker.sample}{of}" if worker.sample is not None else f"samples from {worker.first}{of}"


def _waiting(hang: Hang, ranks: int) -> str:
    others = ranks - len(hang.culprits)
    if not others:
        return ""
    waiting = "the others wait" if others > 1 else "the other rank waits"
    return f"; {waiting} for {_agreed(hang, 'it', 'them')}"
