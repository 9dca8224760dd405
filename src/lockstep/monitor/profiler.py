"""The profiler of a rank: starts, steps and ends torch's, between two updates.

    update    8       9          10   11   12   13              14
    profiler          warmup     recorded                       --> RUN/profile/rank0.10.pt.trace.json.gz
              start              clock's marks                  ended

Which updates these are follows from the config, or from a request in the vote: all ranks know them, without a
collective of their own. Training waits while a trace is written, a second per 50 MB or so.

The files' names are those that TensorBoard's profiler plugin reads (WORKER.SPAN.pt.trace.json.gz); Perfetto and
chrome://tracing open them as they are. What Lockstep adds is a track `lockstep/PHASE` with the marks of the rank's
clock, and the object "lockstep", which names rank, updates and device.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import pickle
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, profile

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.phase_clock import Phase
from lockstep.core.processes import waited_for_core
from lockstep.core.records import Request
from lockstep.core.terminal import command_line
from lockstep.distributed.memory import end_memory_history, record_memory_history
from lockstep.monitor.folder import lock_holder
from lockstep.monitor.trace_requests import (
    PROFILE,
    TRACE_SUFFIX,
    RequestWatch,
    Span,
    TraceOptions,
    TraceRequest,
    next_free,
    options_of,
    spans_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.config.training_sections import ProfileConfig
    from lockstep.core.phase_clock import Mark
    from lockstep.core.records import StepReport
    from lockstep.distributed.process_group import World

_HEADER_CHARS = 1 << 20
_CHUNK = 1 << 20
_EVENTS = '"traceEvents": ['
_TRACK = 1  # thread number of the phases' track: no process has a thread with it
_log = logging.getLogger("lockstep.monitor")
_QUIET = "6"  # without it, Kineto prints a line at each start and end


class Profiler:
    """Records traces on this rank, if it is asked to.

    Args:
        folder: Of the run.

    Raises:
        ConfigError: The config names a rank that doesn't exist.
    """

    def __init__(self, config: ProfileConfig, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._holder = lock_holder(folder)
        self._watch = RequestWatch(folder, self._announce, self._is_own) if world.rank == 0 else None
        self._planned: list[tuple[Span, TraceOptions]] = [(span, options_of(config)) for span in spans_of(config)]
        self._requested = False  # by the watch, for the next vote
        self._recording: _Recording | None = None
        missing = [rank for rank in options_of(config).ranks or () if rank >= world.size]
        if self._planned and missing:
            last = world.size - 1
            problem = f"rank {missing[0]} doesn't exist: the run has {world.size}, 0 to {last}; name some of these"
            raise ConfigError(Problem("", "profile.ranks", problem))

    @property
    def notes(self) -> list[str]:
        """Sentences for the start of the run."""
        return [
            f"updates {span.first:,} to {span.last:,} are traced by "
            f"{'all ranks' if options.ranks is None else 'rank ' + ', '.join(map(str, options.ranks))} into "
            f"{self._folder / PROFILE}; {command_line('lockstep', 'profile', self._folder)} explains them"
            for span, options in self._planned
        ]

    def begins_after(self, last: int | None) -> str:
        """Return a sentence if a trace of the config begins after the run's last update; None: it isn't known."""
        late = [span for span, _ in self._planned if last is not None and span.first > last]
        return f"profile.steps: update {late[0].first:,} is never reached: the run has {last:,}" if late else ""

    def start(self, steps: int) -> None:
        """Begin, after `steps` updates of the run, with what is left of the config's traces."""
        left = [(span.resumed(steps + 1), options) for span, options in self._planned]
        self._planned = [(span, options) for span, options in left if span is not None]
        if self._watch is not None:
            self._watch.start()
        self.updated(steps)

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's request for the next vote."""
        requested, self._requested = self._requested, False
        return (Request.PROFILE,) if requested else ()

    def see(self, report: StepReport) -> None:
        """Plan what a rank has requested; the same on all ranks."""
        if Request.PROFILE in report.requests:
            request = TraceRequest.decode(self._world.notices.announced())
            span = next_free(report.step, request, [planned for planned, _ in self._planned])
            self._planned = sorted([*self._planned, (span, request.options)], key=lambda item: item[0].first)
            if self._watch is not None:
                self._watch.is_busy = False

    def updated(self, steps: int) -> None:
        """Start, step or end the profiler, after `steps` updates of the run."""
        if self._recording is None and not self._planned:
            return
        with self._world.clock.phase(Phase.EVALUATION):  # the profiler's own time is no update's
            self._advance(steps)

    def _advance(self, steps: int) -> None:
        if self._recording is not None and not self._recording.updated(steps):
            self._end()
        while self._planned and self._planned[0][0].last <= steps:
            del self._planned[0]
        if self._planned and self._planned[0][0].begin == steps + 1:
            span, options = self._planned[0]
            if options.includes(self._world.rank):
                self._recording = _Recording.started(span, options, self._world)

    def close(self) -> None:
        """End a trace that isn't over, and write it."""
        if self._watch is not None:
            self._watch.stop()
        if self._recording is not None:
            self._end()

    def _announce(self, request: TraceRequest) -> None:
        """Announce a request to all ranks, then make it known in the vote."""
        self._world.notices.announce(request.encode())
        self._requested = True

    def _end(self) -> None:
        recording, self._recording = self._recording, None
        trace = recording.ended() if recording is not None else None
        if trace is None or not self._is_own():
            return
        try:
            _write_trace(trace, self._folder / PROFILE)
        except Exception as error:
            _log.warning("a trace can't be written: %s; the run continues without it", error)

    def _is_own(self) -> bool:
        return lock_holder(self._folder) == self._holder


class _Recording:
    """A running profiler of torch."""

    def __init__(self, span: Span, options: TraceOptions, world: World, profiler: profile) -> None:
        self._span = span
        self._options = options
        self._world = world
        self._profiler = profiler
        self._last = span.begin - 1  # update that has ended
        self._waited: float | None = None  # for a core, before the first recorded update

    @classmethod
    def started(cls, span: Span, options: TraceOptions, world: World) -> _Recording | None:
        """Start torch's profiler before the span's first update; None, with a warning, if another one runs."""
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        profiler = profile(
            schedule=lambda step: _action(span, step),
            on_trace_ready=lambda _: None,  # it is written later
            record_shapes=options.shapes,
            profile_memory=options.memory,
            with_stack=options.stacks,
            with_flops=options.flops,
        )
        profiler.step_num = span.begin  # torch counts from 0
        profiler.current_action = profiler.schedule(span.begin)  # type: ignore[assignment]  # of a too narrow type in torch
        recording = cls(span, options, world, profiler)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profiler.start()
        except RuntimeError as error:
            _log.warning("updates %d to %d aren't traced: %s", span.first, span.last, error)
            return None
        recording._record_if_first()
        return recording

    def updated(self, steps: int) -> bool:
        """Step the profiler after an update; return whether it records on."""
        self._last = steps
        if steps >= self._span.last:
            return False
        self._profiler.step()
        self._record_if_first()
        return True

    def ended(self) -> _EndedTrace | None:
        """End the profiler; return what it has recorded, None if that is no whole update."""
        marks = self._world.clock.recorded()
        waited = waited_for_core()
        records = self._last >= self._span.first
        snapshot = end_memory_history(self._world.device) if self._options.memory and marks else None
        if self._profiler.current_action in (ProfilerAction.NONE, ProfilerAction.WARMUP) or not records:
            self._profiler.stop()
            return None
        self._profiler.stop()
        facts: dict[str, Any] = {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "first": self._span.first,
            "last": self._last,
            "host": socket.gethostname(),
            "device": self._world.device.type,
            "backend": self._world.backend,
            "torch": torch.__version__,
        }
        if waited is not None and self._waited is not None:
            facts["waited_for_core"] = waited - self._waited
        offset = time.time_ns() - time.perf_counter_ns()
        return _EndedTrace(self._profiler.export_chrome_trace, facts, marks, offset, snapshot)

    def _record_if_first(self) -> None:
        """Keep the clock's marks, and the history of a GPU's memory, from the first recorded update on."""
        if self._last + 1 == self._span.first:
            self._world.clock.record()
            self._waited = waited_for_core()
            if self._options.memory:
                record_memory_history(self._world.device)


def _action(span: Span, step: int) -> ProfilerAction:
    """Return what torch's profiler does in an update."""
    if step < span.first:
        return ProfilerAction.WARMUP if step >= span.begin else ProfilerAction.NONE
    if step > span.last:
        return ProfilerAction.NONE
    return ProfilerAction.RECORD if step < span.last else ProfilerAction.RECORD_AND_SAVE


@dataclass(frozen=True, slots=True)
class _EndedTrace:
    """A trace that was recorded and isn't written.

    Attributes:
        export: Writes Kineto's JSON to a path.
        facts: The object "lockstep": rank, ranks, first, last, host, device, seconds that the main thread waited for
            a core.
        marks: Of the rank's clock.
        offset: Nanoseconds from the clock's to Unix time.
        snapshot: Of a GPU's memory, for `torch.cuda.memory`; None: there is none.
    """

    export: Callable[[str], Any]
    facts: dict[str, Any]
    marks: Sequence[Mark]
    offset: int
    snapshot: Any = None

    @property
    def stem(self) -> str:
        return f"rank{self.facts['rank']}.{self.facts['first']}"


def _write_trace(trace: _EndedTrace, folder: Path) -> None:
    """Write a trace. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if trace.snapshot is not None:
        (folder / f"{trace.stem}.memory.pickle").write_bytes(pickle.dumps(trace.snapshot))
    path = folder / f"{trace.stem}{TRACE_SUFFIX}"
    plain, packed = path.with_suffix(".kineto"), path.with_suffix(".part")
    try:
        trace.export(str(plain))
        with plain.open(encoding="utf-8") as source, gzip.open(packed, "wt", 1, encoding="utf-8") as target:
            _add_marks(trace, source, target)
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _add_marks(trace: _EndedTrace, source: IO[str], target: IO[str]) -> None:
    """Copy Kineto's JSON with the marks as events, and the facts."""
    header = source.read(_HEADER_CHARS)
    before, begins, after = header.partition(_EVENTS)
    if not begins:
        raise OSError(f"torch's trace has no {_EVENTS} in its first {_HEADER_CHARS:,} characters")
    match = re.search(r'"baseTimeNanoseconds":\s*(\d+)', before)
    base = int(match[1]) if match else 0
    facts = {**trace.facts, "process": os.getpid()}
    target.write(before.replace("{", f'{{"lockstep": {json.dumps(facts)},', 1) + begins)
    for event in _events(trace, base):
        target.write(json.dumps(event) + ",\n")
    target.write(after)
    while chunk := source.read(_CHUNK):
        target.write(chunk)


def _events(trace: _EndedTrace, base: int) -> Iterator[dict[str, Any]]:
    """Yield the updates and phases of the clock as events of a track of its own."""
    track = {"pid": os.getpid(), "tid": _TRACK}
    yield {"ph": "M", "name": "thread_name", **track, "args": {"name": "phases of the update (lockstep)"}}
    marks = [(round(at * 1e9) + trace.offset - base, phase) for at, phase in trace.marks]
    ends = [at for at, phase in marks if phase is None]
    for number, (begin, end) in enumerate(pairwise(ends), trace.facts["first"]):
        yield _slice(track, f"lockstep/update {number}", begin, end, update=number)
    phases = [(at, phase) for at, phase in marks if phase is not None and ends and ends[0] <= at < ends[-1]]
    for (begin, phase), end in zip(phases, [at for at, _ in phases[1:]] + ends[-1:], strict=False):
        if end > begin:
            yield _slice(track, f"lockstep/{Phase(phase).name.lower()}", begin, end)


def _slice(track: dict[str, int], name: str, begin: int, end: int, **arguments: Any) -> dict[str, Any]:
    """Return an event between two times in nanoseconds."""
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "cat": "lockstep", "name": name, **track, **times, "args": arguments}
