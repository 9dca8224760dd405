"""The profiler of a rank: starts, steps and ends torch's, between two updates.

    update    8       9          10   11   12   13              14
    profiler          warmup     recorded                       --> RUN/profile/rank0.10.pt.trace.json.gz, by a thread
              start              clock's marks                  ended

Which updates these are follows from the config, or from a request in the vote: they
record the same ones, without a collective of their own.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, profile

from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import counted
from lockstep.core.phase_clock import Phase
from lockstep.core.records import Request
from lockstep.core.run_queue import waited_for_core
from lockstep.distributed.memory import end_memory_history, record_memory_history
from lockstep.monitor.profile_spans import (
    PROFILE,
    Span,
    TraceOptions,
    TraceRequest,
    next_free,
    options_of,
    spans_of,
)
from lockstep.monitor.run_lock import lock_holder
from lockstep.monitor.trace_files import EndedTrace, TraceWriter, write_trace
from lockstep.monitor.trace_requests import RequestWatch, TraceAnswer, write_answer

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.config.training_sections import ProfileConfig
    from lockstep.core.records import StepReport
    from lockstep.distributed.process_group import World

_log = logging.getLogger("lockstep.monitor")
_QUIET = "6"  # without it, Kineto prints a line at each start and end
_FORK_S = 1.0  # that a trace may wait for earlier ones until the process that writes it is forked


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
        self._writer = TraceWriter()
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
            request = TraceRequest.of_record(json.loads(self._world.notices.announced()))
            self._answer(self._plan(report.step, request))

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
        """End a trace that isn't over, and wait until all is written."""
        if self._watch is not None:
            self._watch.stop()
        if self._recording is not None:
            self._end()
        self._writer.close()

    def _plan(self, step: int, request: TraceRequest) -> TraceAnswer:
        options, size = request.options, self._world.size
        ranks = tuple(range(size)) if options.ranks is None else options.ranks
        missing = [rank for rank in ranks if rank >= size]
        if missing:
            return TraceAnswer(request.name, refusal=f"the run has {counted(size, 'rank')}, and no rank {missing[0]}")
        span = next_free(step, request, [planned for planned, _ in self._planned])
        self._planned = sorted([*self._planned, (span, options)], key=lambda item: item[0].first)
        return TraceAnswer(request.name, span.first, span.last, ranks)

    def _answer(self, answer: TraceAnswer) -> None:
        watch = self._watch
        if watch is None:
            return

        def write() -> None:
            write_answer(self._folder, answer)
            watch.answered(answer.name)

        self._writer.submit(write)

    def _announce(self, request: TraceRequest) -> None:
        """Announce a request to all ranks, then make it known in the vote."""
        self._world.notices.announce(json.dumps(request.record()).encode())
        self._requested = True

    def _end(self) -> None:
        recording, self._recording = self._recording, None
        trace = recording.ended() if recording is not None else None
        if trace is not None and self._is_own():
            self._writer.submit(partial(write_trace, trace, self._folder / PROFILE))
            trace.is_forked.wait(_FORK_S)  # here: it is no update's time

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

    def ended(self) -> EndedTrace | None:
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
        return EndedTrace(self._profiler.export_chrome_trace, facts, marks, offset, snapshot)

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
