"""The texts about a rank that hangs: a line for the terminal, and a report with all stacks for the run's folder.

rank 1 hangs fetching data at data.py:33 in __getitem__ (update 12, sample 311); the others wait for it
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import named_ranks
from lockstep.core.files import append_line, write_atomically
from lockstep.core.heartbeat import Reading, Stage, Worker
from lockstep.core.phase_clock import Phase
from lockstep.core.secrets import shareable
from lockstep.launch.rank_stacks import FlightRecord, Frame, line_of, main_frames, waits_for_accelerator

REPORT = "hangs.txt"
_RECORDS = "flight_record"
_NO_STACK = "no stack: it is stopped, or the kernel doesn't interrupt it"
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


@dataclass(frozen=True, slots=True)
class Sight:
    """A rank at a moment, before stacks are requested: that signal ends a wait in the kernel, such as sleep().

    Attributes:
        place: Its number on this host.
        mark: Time of its last mark.
        age: Seconds since then that count.
        waits: Whether it is in a collective.
        state: The kernel's letter for the state of its process, if it hasn't moved for a while.
        step: The update of the run that it makes, from 1.
        updates, calls: Updates of this process that have ended; collectives that it has called.
        reading: What its own process reads.
        worker: The first data worker that reads, if it may wait for one.
        limit: Seconds after which it is named if it doesn't move.
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
    def where(self) -> str:
        """The place in its run, as text."""
        if self.stage in (Stage.START, Stage.END):
            return "at the start of the run" if self.stage is Stage.START else "at the end of the run"
        return _PLACES[Phase.DATA if self.phase is Phase.HOST and (self.reading or self.worker) else self.phase]


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that hang; none if all ranks of this host wait for those of other hosts.

    Attributes:
        stacks: By process, of all ranks of this host.
        records: By rank, of those that have written one.
        is_stopped: Whether they are stopped (SIGSTOP).
        collectives: What the ranks of this host wait in, as text, if all do.
    """

    culprits: tuple[Sight, ...]
    stacks: Mapping[int, str]
    records: Mapping[int, FlightRecord]
    is_stopped: bool = False
    collectives: str = ""

    def frames_of(self, process: int) -> list[Frame]:
        return main_frames(self.stacks.get(process, ""))


def name_text(hang: Hang, ranks: int, seconds: float, follows: str) -> str:
    """Return the line that names ranks that haven't moved for some seconds, and what follows."""
    if not hang.culprits:
        what = f"the ranks of this host have waited {seconds:.0f} s for those of other hosts: {hang.collectives}"
    elif hang.collectives:
        what = f"no rank has moved for {seconds:.1f} s: {hang.collectives}"
    elif hang.is_stopped:
        what = _described(hang, "is stopped (SIGSTOP)", "are stopped (SIGSTOP)", ranks)
    else:
        what = _described(hang, f"hasn't moved for {seconds:.1f} s,", f"haven't moved for {seconds:.1f} s,", ranks)
    return f"lockstep: {what}{follows}"


def hang_text(hang: Hang, ranks: int) -> str:
    """Return the message about ranks that hang."""
    if not hang.culprits:
        return f"the ranks of this host wait for those of other hosts: {hang.collectives}"
    if hang.collectives:
        return f"the ranks wait in collectives that don't match: {hang.collectives}"
    if hang.is_stopped:
        return _described(hang, "was stopped (SIGSTOP)", "were stopped (SIGSTOP)", ranks)
    return _described(hang, "hangs", "hang", ranks)


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
    """Append the stacks of all ranks to the run's report; return the end of a message that names it."""
    if logs is None:
        return ""
    lines = [f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {hang_text(hang, len(sights))}", ""]
    for sight in sights:
        doing = f"{sight.where}, update {sight.step:,}, for {sight.age:.1f} s; {sight.calls} collectives called"
        record = hang.records.get(sight.rank, FlightRecord())
        if record.pending:
            doing += f"; not complete: {'; '.join(record.pending)}"
        lines += [f"--- rank {sight.rank}, process {sight.process}, state {sight.state or '?'}: {doing}"]
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
    """Write the flight records of this host's ranks, instead of those of an earlier hang."""
    if records:
        folder.mkdir(exist_ok=True)
    for sight in sights:
        if sight.rank in records:
            write_atomically(folder / f"rank_{sight.rank}", records[sight.rank].content, durable=False)
        else:
            (folder / f"rank_{sight.rank}").unlink(missing_ok=True)


def _described(hang: Hang, is_: str, are: str, ranks: int) -> str:
    """Return what ranks do and where, and that the others wait for them."""
    culprit, is_single = hang.culprits[0], len(hang.culprits) == 1
    frames = hang.frames_of(culprit.process)
    line = line_of(frames)
    at = f" at {line}" if line is not None else ""
    if waits_for_accelerator(frames):
        at = f", and waits for its accelerator{at}"
    update = f"update {culprit.step:,}" if culprit.stage not in (Stage.START, Stage.END) else ""
    details = ", ".join(filter(None, (update, _read_by(culprit, hang))))
    names = named_ranks([each.rank for each in hang.culprits])
    where = culprit.where if is_single else culprit.where.replace(" its ", " their ")
    waiting = {0: "", 1: f"; the other rank waits for {'it' if is_single else 'them'}"}.get(
        ranks - len(hang.culprits), f"; the others wait for {'it' if is_single else 'them'}"
    )
    return f"{names} {is_ if is_single else are} {where}{at}{f' ({details})' if details else ''}{waiting}"


def _read_by(sight: Sight, hang: Hang) -> str:
    """Return the samples that a rank reads, or its data worker."""
    if sight.reading is not None or (worker := sight.worker) is None:
        return str(sight.reading or "")
    line = line_of(hang.frames_of(worker.process))
    return f"data worker {worker.number} reads {worker.reading}{f' at {line}' if line is not None else ''}"
