"""The updates that are traced, and how: from a config, or from a request while the run trains, a file in its folder.

    steps: 10..21, active: 3, wait: 2, warmup: 1

    update   9         10 11 12   13 14   15        16 17 18   19 20   21
             warmup    trace      wait    warmup    trace      wait    (too few for a third)

    lockstep profile RUN --> profile/request.json --> rank 0's thread --> announced to all ranks, Request.PROFILE
                                                                          in the vote: all record the same updates
                             profile/answer.json  <-- which updates, on which ranks; or why not

No update touches the disk for it: a thread of the first rank looks every half second whether there is a request.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.training_sections import step_range
from lockstep.core.files import read_bounded, write_atomically
from lockstep.monitor.folder import LOCK

if TYPE_CHECKING:
    from lockstep.config.training_sections import ProfileConfig

PROFILE = "profile"
"""The folder of a run's traces."""
TRACE_SUFFIX = ".pt.trace.json.gz"
REQUEST_LEAD = 3
"""Updates between the vote that carries a request and its warmup: on a GPU, a vote is read one late."""
REQUEST = "request.json"
ANSWER = "answer.json"
_MAX_BYTES = 1 << 16
_SECONDS_BETWEEN_LOOKS = 0.5
_log = logging.getLogger("lockstep.monitor")


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
        name: Identifies the request and its answer.
        count: Number of updates to record.
    """

    name: str
    count: int
    warmup: int
    options: TraceOptions

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> TraceRequest:
        options = dict(record["options"])
        ranks = options.pop("ranks")
        return cls(
            str(record["name"]),
            int(record["count"]),
            int(record["warmup"]),
            TraceOptions(None if ranks is None else tuple(map(int, ranks)), **options),
        )


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


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceAnswer:
    """A run's answer to a request.

    Attributes:
        name: Of the request.
        first, last: Numbers of the updates that are recorded; 0 if none are.
        ranks: Ranks that record them.
        refusal: Why none are recorded; None if they are.
        time: Unix time.
    """

    name: str
    first: int = 0
    last: int = 0
    ranks: tuple[int, ...] = ()
    refusal: str | None = None
    time: float = 0.0


def write_answer(run: Path, answer: TraceAnswer) -> None:
    """Write an answer, and remove its request. Raises OSError."""
    (run / PROFILE).mkdir(exist_ok=True)
    write_atomically(run / PROFILE / ANSWER, json.dumps({**asdict(answer), "time": time.time()}) + "\n", durable=False)
    (run / PROFILE / REQUEST).unlink(missing_ok=True)


def read_answer(run: Path) -> TraceAnswer | None:
    """Return the latest answer; None if there is none."""
    record = _read(run / PROFILE / ANSWER)
    if record is None:
        return None
    try:
        return TraceAnswer(**{**record, "ranks": tuple(record["ranks"])})
    except (KeyError, TypeError):
        return None


class RequestWatch:
    """Looks for requests, in a thread of the first rank.

    Args:
        announce: Receives each request once.
        is_own: Returns whether the folder is still this run's.
    """

    def __init__(self, run: Path, announce: Callable[[TraceRequest], None], is_own: Callable[[], bool]) -> None:
        self._run = run
        self._announce = announce
        self._is_own = is_own
        self._pending: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="lockstep-trace-requests", daemon=True)

    def start(self) -> None:
        """Remove what an earlier launch has left, and look from now on; a request that came since stays."""
        launched = _changed(self._run / LOCK)
        for name in (REQUEST, ANSWER):
            file = self._run / PROFILE / name
            with suppress(OSError):
                if name == ANSWER or _changed(file) < launched:
                    file.unlink(missing_ok=True)
        self._thread.start()

    def answered(self, name: str) -> None:
        """Note that a request has its answer."""
        if self._pending == name:
            self._pending = None

    def stop(self) -> None:
        """End the thread; refuse a request without an answer."""
        self._ended.set()
        self._thread.join(_SECONDS_BETWEEN_LOOKS)
        with suppress(OSError):
            request = self._request()
            if request is not None and self._is_own():
                write_answer(self._run, TraceAnswer(request.name, refusal="the run has ended"))

    def _poll(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                request = self._request()
                if request is not None and request.name != self._pending and self._is_own():
                    self._pending = request.name
                    self._announce(request)
            except RuntimeError:  # the ranks' store has ended
                return
            except Exception:
                _log.warning("requests for traces fail; the run continues, and answers none", exc_info=True)
                return

    def _request(self) -> TraceRequest | None:
        record = _read(self._run / PROFILE / REQUEST)
        if record is None:
            return None
        try:
            return TraceRequest.of_record(record)
        except (KeyError, TypeError, ValueError):
            return None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(read_bounded(path, _MAX_BYTES))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
