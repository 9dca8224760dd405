"""The profiler of a rank: starts, steps and ends torch's, between two updates.

All ranks know the updates from the config, or from a request in the vote. Training waits while a trace is written.
TensorBoard's profiler plugin, Perfetto and chrome://tracing read the files. Lockstep adds a track `lockstep/PHASE` with
the marks of the rank's clock, and the object "lockstep", with rank, updates and device.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import pickle
import re
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, profile, schedule

from lockstep.config.training_sections import ProfileConfig
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.phase_clock import Phase
from lockstep.core.processes import waited_for_core
from lockstep.core.records import Request
from lockstep.core.terminal import command_line
from lockstep.distributed.memory import end_memory_history, record_memory_history
from lockstep.monitor.folder import lock_holder
from lockstep.monitor.trace_requests import PROFILE, TRACE_SUFFIX, RequestWatch, Span, includes, next_free, span_of

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.core.phase_clock import Mark
    from lockstep.core.records import StepReport
    from lockstep.distributed.process_group import World

_HEADER_CHARS = 1 << 20
_EVENTS = '"traceEvents": ['
_TRACK = 1  # thread number of the phases' track: no process has a thread with it
_log = logging.getLogger("lockstep.monitor")
_QUIET = "6"  # without it, Kineto prints a line at each start and end


class Profiler:
    """Records traces on this rank. Raises ConfigError if `profile.ranks` has a rank that doesn't exist."""

    def __init__(self, config: ProfileConfig, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._holder = lock_holder(folder)
        self._watch = RequestWatch(folder, self._announce, self._is_own) if world.rank == 0 else None
        span = span_of(config)
        self._planned: list[tuple[Span, ProfileConfig]] = [(span, config)] if span is not None else []
        self._requested = False  # by the watch, for the next vote
        self._recording: _Recording | None = None
        missing = [rank for rank in config.ranks if isinstance(rank, int) and rank >= world.size]
        if self._planned and missing:
            problem = f"rank {missing[0]} doesn't exist: the run has {world.size}, 0 to {world.size - 1}"
            raise ConfigError(Problem("", "profile.ranks", problem))

    @property
    def notes(self) -> list[str]:
        """Sentences for the start of the run."""
        return [
            f"updates {span.first:,} to {span.last:,} are traced by "
            f"{'all ranks' if options.ranks == 'all' else 'rank ' + ', '.join(map(str, options.ranks))} into "
            f"{self._folder / PROFILE}; {command_line('lockstep', 'profile', self._folder)} explains them"
            for span, options in self._planned
        ]

    def begins_after(self, last: int | None) -> str:
        """Return a sentence if a trace of the config begins after the run's last update."""
        late = [span for span, _ in self._planned if last is not None and span.first > last]
        return f"profile.steps: update {late[0].first:,} is never reached: the run has {last:,}" if late else ""

    def start(self, steps: int) -> None:
        """Begin, after `steps` updates of the run."""
        left = [(span.resumed(steps + 1), options) for span, options in self._planned]
        self._planned = [(span, options) for span, options in left if span is not None]
        if self._watch is not None:
            self._watch.start()
        self.updated(steps)

    @property
    def is_active(self) -> bool:
        """True while a trace is recorded, or planned."""
        return self._recording is not None or bool(self._planned)

    def requests(self) -> tuple[Request, ...]:
        requested, self._requested = self._requested, False
        return (Request.PROFILE,) if requested else ()

    def see(self, report: StepReport) -> None:
        """Plan a requested trace; the same on all ranks."""
        if Request.PROFILE in report.requests:
            request = ProfileConfig.model_validate_json(self._world.notices.announced())
            span = next_free(report.step, request, [planned for planned, _ in self._planned])
            self._planned = sorted([*self._planned, (span, request)], key=lambda item: item[0].first)
            if self._watch is not None:
                self._watch.is_busy = False

    def updated(self, steps: int) -> None:
        """Start, step or end the profiler, after `steps` updates of the run."""
        if not self.is_active:
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
            if includes(options, self._world.rank):
                self._recording = _Recording.started(span, options, self._world)

    def close(self) -> None:
        """End a trace that isn't over, and write it."""
        if self._watch is not None:
            self._watch.stop()
        if self._recording is not None:
            self._end()

    def _announce(self, request: bytes) -> None:
        self._world.notices.announce(request)
        self._requested = True

    def _end(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None or not recording.stopped() or not self._is_own():
            return
        try:
            recording.write(self._folder / PROFILE)
        except Exception as error:
            _log.warning("a trace can't be written: %s; the run continues without it", error)

    def _is_own(self) -> bool:
        return lock_holder(self._folder) == self._holder


class _Recording:
    def __init__(self, span: Span, options: ProfileConfig, world: World, profiler: profile) -> None:
        self._span = span
        self._options = options
        self._world = world
        self._profiler = profiler
        self._last = span.begin - 1  # update that has ended
        self._waited: float | None = None  # for a core: until the first recorded update; at the end, since then
        self._marks: Sequence[Mark] = ()
        self._snapshot: Any = None  # of a GPU's memory, for `torch.cuda.memory`
        self._offset = 0

    @classmethod
    def started(cls, span: Span, options: ProfileConfig, world: World) -> _Recording | None:
        """Start torch's profiler before the span's first update; None, with a warning, if another one runs."""
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profiler = profile(
                    schedule=schedule(wait=0, warmup=span.first - span.begin, active=span.count, repeat=1),
                    on_trace_ready=lambda _: None,  # it is written later
                    record_shapes=options.shapes,
                    profile_memory=options.memory,
                    with_stack=options.stacks,
                    with_flops=options.flops,
                )
                profiler.start()
        except RuntimeError as error:
            _log.warning("updates %d to %d aren't traced: %s", span.first, span.last, error)
            return None
        recording = cls(span, options, world, profiler)
        recording._record_if_first()
        return recording

    def updated(self, steps: int) -> bool:
        """Step the profiler after an update; return False if it was the last one."""
        self._last = steps
        if steps >= self._span.last:
            return False
        self._profiler.step()
        self._record_if_first()
        return True

    def stopped(self) -> bool:
        """Stop the profiler; return whether it recorded a whole update."""
        waited, action = waited_for_core(), self._profiler.current_action
        self._marks = self._world.clock.recorded()
        self._snapshot = end_memory_history(self._world.device) if self._options.memory and self._marks else None
        self._profiler.stop()
        self._offset = time.time_ns() - time.perf_counter_ns()  # from the clock's to Unix time
        if waited is not None and self._waited is not None:
            self._waited = waited - self._waited
        return action not in (ProfilerAction.NONE, ProfilerAction.WARMUP) and self._last >= self._span.first

    def write(self, folder: Path) -> None:
        """Write Kineto's JSON, with the clock's marks and the object "lockstep". Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank{self._world.rank}.{self._span.first}"
        if self._snapshot is not None:
            (folder / f"{stem}.memory.pickle").write_bytes(pickle.dumps(self._snapshot))
        path = folder / f"{stem}{TRACE_SUFFIX}"
        plain, packed = path.with_suffix(".kineto"), path.with_suffix(".part")
        try:
            self._profiler.export_chrome_trace(str(plain))
            with plain.open(encoding="utf-8") as source, gzip.open(packed, "wt", 1, encoding="utf-8") as target:
                self._add_marks(source, target)
            packed.replace(path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)

    def _add_marks(self, source: IO[str], target: IO[str]) -> None:
        before, begins, after = source.read(_HEADER_CHARS).partition(_EVENTS)
        if not begins:
            raise OSError(f"torch's trace has no {_EVENTS} in its first {_HEADER_CHARS:,} characters")
        match = re.search(r'"baseTimeNanoseconds":\s*(\d+)', before)
        facts = {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "first": self._span.first,
            "last": self._last,
            "host": socket.gethostname(),
            "device": self._world.device.type,
            "backend": self._world.backend,
            "torch": torch.__version__,
            "process": os.getpid(),
            **({"waited_for_core": self._waited} if self._waited is not None else {}),
        }
        target.write(before.replace("{", f'{{"lockstep": {json.dumps(facts)},', 1) + begins)
        since = self._offset - (int(match[1]) if match else 0)
        marks = [(round(at * 1e9) + since, phase) for at, phase in self._marks]
        for event in _events(marks, self._span.first):
            target.write(json.dumps(event) + ",\n")
        target.write(after)
        shutil.copyfileobj(source, target)

    def _record_if_first(self) -> None:
        if self._last + 1 == self._span.first:
            self._world.clock.record()
            self._waited = waited_for_core()
            if self._options.memory:
                record_memory_history(self._world.device)


def _events(marks: Sequence[tuple[int, Phase | None]], first: int) -> Iterator[dict[str, Any]]:
    """Yield updates, from `first` on, and phases as events of a track of their own; times are in nanoseconds."""
    track = {"pid": os.getpid(), "tid": _TRACK}
    yield {"ph": "M", "name": "thread_name", **track, "args": {"name": "phases of the update (lockstep)"}}
    ends = [at for at, phase in marks if phase is None]
    for number, (begin, end) in enumerate(pairwise(ends), first):
        yield _slice(track, f"lockstep/update {number}", begin, end, update=number)
    phases = [(at, phase) for at, phase in marks if phase is not None and ends and ends[0] <= at < ends[-1]]
    for (begin, phase), end in zip(phases, [at for at, _ in phases[1:]] + ends[-1:], strict=False):
        if end > begin:
            yield _slice(track, f"lockstep/{Phase(phase).name.lower()}", begin, end)


def _slice(track: dict[str, int], name: str, begin: int, end: int, **arguments: Any) -> dict[str, Any]:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "cat": "lockstep", "name": name, **track, **times, "args": arguments}
