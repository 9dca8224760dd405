"""The updates that are traced, and how: from a config, or from a request while the run trains, a file in its folder.

    steps: 10..21, active: 3, wait: 2, warmup: 1

    update   9         10 11 12   13 14   15        16 17 18   19 20   21
             warmup    trace      wait    warmup    trace      wait    (too few for a third)

    lockstep profile RUN --> profile/request.json --> rank 0's thread --> announced to all ranks, Request.PROFILE
                                                                          in the vote: all record the same updates

No update touches the disk for it: a thread of the first rank looks every half second whether there is a request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.training_sections import step_range
from lockstep.core.files import read_bounded
from lockstep.monitor.folder import LOCK

if TYPE_CHECKING:
    from lockstep.config.training_sections import ProfileConfig

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
    """The updates of one trace.

    Attributes:
        first, last: Numbers of the updates that are recorded, from 1.
        warmup: Updates before, in which the profiler runs already.
    """

    first: int
    last: int
    warmup: int

    @property
    def begin(self) -> int:
        """The first update in which the profiler runs."""
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


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The content of a trace; see `ProfileConfig`.

    Attributes:
        ranks: Ranks that record; None: all.
    """

    ranks: tuple[int, ...] | None = (0,)
    shapes: bool = True
    memory: bool = True
    stacks: bool = False
    flops: bool = False

    def includes(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request for a trace of the next updates of a run that trains.

    Attributes:
        count: Number of updates to record.
    """

    count: int
    warmup: int
    options: TraceOptions

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> TraceRequest:
        """Return the request. Raises ValueError, TypeError, KeyError."""
        record = json.loads(data)
        options = dict(record["options"])
        ranks = options.pop("ranks")
        ranks = None if ranks is None else tuple(map(int, ranks))
        return cls(int(record["count"]), int(record["warmup"]), TraceOptions(ranks, **options))


def spans_of(config: ProfileConfig) -> list[Span]:
    """Return the traces that a config asks for."""
    if config.steps is None:
        return []
    first, last = step_range(config.steps)
    active = config.active or last - first + 1
    period = active + config.wait + config.warmup
    starts = list(range(first, last - active + 2, period))[: config.repeat]
    return [Span(start, start + active - 1, min(config.warmup, start - 1)) for start in starts]


def options_of(config: ProfileConfig) -> TraceOptions:
    """Return what a config's traces have."""
    ranks = None if config.ranks == "all" else tuple(config.ranks)
    return TraceOptions(ranks, config.shapes, config.memory, config.stacks, config.flops)


def next_free(step: int, request: TraceRequest, planned: Sequence[Span]) -> Span:
    """Return the updates of a request from the vote of update `step`, after those that are planned."""
    span = Span(
        step + REQUEST_LEAD + request.warmup, step + REQUEST_LEAD + request.warmup + request.count - 1, request.warmup
    )
    for other in sorted(planned, key=lambda other: other.first):
        if span.begin <= other.last and other.begin <= span.last:
            first = other.last + 1 + request.warmup
            span = Span(first, first + request.count - 1, request.warmup)
    return span


class RequestWatch:
    """Takes requests from the run's folder, one after the other, in a thread of the first rank.

    Args:
        announce: Receives each request.
        is_own: Returns whether the folder is still this run's.
    """

    def __init__(self, run: Path, announce: Callable[[TraceRequest], None], is_own: Callable[[], bool]) -> None:
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
                    request = TraceRequest.decode(read_bounded(self._file, _MAX_BYTES))
                    self._file.unlink()
                    self.is_busy = True
                    self._announce(request)
            except (OSError, ValueError, TypeError, KeyError):  # there is none, or none that is whole
                continue
            except RuntimeError:  # the ranks' store has ended
                return
