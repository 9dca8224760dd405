"""The updates that are traced, and how: from a config, or from a request while the run trains, a file in its folder.

steps: 10..12, warmup: 1

update   9         10 11 12
         warmup    trace

lockstep profile RUN --> profile/request.json --> rank 0's thread --> announced to all ranks --> Request.PROFILE
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.training_sections import ProfileConfig, step_range
from lockstep.core.files import read_bounded
from lockstep.monitor.folder import LOCK

PROFILE = "profile"
"""The folder of a run's traces."""
TRACE_SUFFIX = ".pt.trace.json.gz"
REQUEST_LEAD = 3
"""Updates between the vote that carries a request and its warmup: on a GPU, a vote is read one late."""
REQUEST = "request.json"
_MAX_BYTES = 1 << 16
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True, slots=True)
class Span:
    """The updates of one trace, from 1; in `warmup` updates before, the profiler runs already."""

    first: int
    last: int
    warmup: int

    @property
    def begin(self) -> int:
        """The first update of the profiler."""
        return max(1, self.first - self.warmup)

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def resumed(self, next_update: int) -> Span | None:
        """Return what is left of the span before `next_update`; None if it is over."""
        if next_update > self.last:
            return None
        first = max(self.first, next_update)
        return Span(first, self.last, first - max(self.begin, next_update))


def includes(options: ProfileConfig, rank: int) -> bool:
    """Return whether a rank records."""
    return options.ranks == "all" or rank in options.ranks


def span_of(config: ProfileConfig) -> Span | None:
    """Return the trace that a config asks for, if it asks for one."""
    if config.steps is None:
        return None
    first, last = step_range(config.steps)
    return Span(first, last, min(config.warmup, first - 1))


def next_free(step: int, request: ProfileConfig, planned: Sequence[Span]) -> Span:
    """Return as many updates as a request has, from the vote of update `step`, after those that are planned."""
    begin, (first, last) = step + REQUEST_LEAD, step_range(request.steps or 1)
    length = last - first + 1
    for other in sorted(planned, key=lambda other: other.first):
        if begin <= other.last and other.begin < begin + request.warmup + length:
            begin = other.last + 1
    return Span(begin + request.warmup, begin + request.warmup + length - 1, request.warmup)


class RequestWatch:
    """Takes requests from the run's folder, in a thread of rank 0, while `is_own` says the folder is this run's."""

    def __init__(self, run: Path, announce: Callable[[bytes], None], is_own: Callable[[], bool]) -> None:
        self._lock = run / LOCK
        self._file = run / PROFILE / REQUEST
        self._announce = announce
        self._is_own = is_own
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="lockstep-trace-requests", daemon=True)
        self.is_busy = False
        """True until the last request's updates are planned."""

    def start(self) -> None:
        """Remove a request to an earlier launch, and look from now on."""
        with suppress(OSError):
            if self._file.stat().st_mtime < self._lock.stat().st_mtime:
                self._file.unlink()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(_SECONDS_BETWEEN_LOOKS)

    def _poll(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                if not self.is_busy and self._is_own():
                    request = read_bounded(self._file, _MAX_BYTES)
                    ProfileConfig.model_validate_json(request)
                    self._file.unlink()
                    self.is_busy = True
                    self._announce(request)
            except (OSError, ValueError):  # there is none, or none that is whole
                continue
            except RuntimeError:  # the ranks' store has ended
                return
