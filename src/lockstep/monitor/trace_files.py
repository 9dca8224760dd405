"""The files of traces, written by a thread, and its heavy part by a process forked from it.

    profiler (ended) --thread--> fork --> Kineto's JSON, and the marks of the clock --> rank0.10.pt.trace.json.gz

Kineto writes without releasing Python's lock, for a second per 50 MB: in a child, training doesn't wait for it.

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
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from lockstep.core.phase_clock import Phase
from lockstep.monitor.profile_spans import TRACE_SUFFIX

if TYPE_CHECKING:
    from lockstep.core.phase_clock import Mark

_HEADER_CHARS = 1 << 20
_CHUNK = 1 << 20
_EVENTS = '"traceEvents": ['
_TRACK = 1  # thread number of the phases' track: no process has a thread with it
_PATIENCE_S = 300.0
_log = logging.getLogger("lockstep.monitor")


@dataclass(frozen=True, slots=True)
class EndedTrace:
    """A trace that was recorded and isn't written.

    Attributes:
        export: Writes Kineto's JSON to a path.
        facts: The object "lockstep": rank, ranks, first, last, host, device, seconds that the main thread waited for
            a core.
        marks: Of the rank's clock.
        offset: Nanoseconds from the clock's to Unix time.
        snapshot: Of a GPU's memory, for `torch.cuda.memory`; None: there is none.
        is_forked: Set once the process that writes it is forked, during which all threads stand still.
    """

    export: Callable[[str], Any]
    facts: dict[str, Any]
    marks: Sequence[Mark]
    offset: int
    snapshot: Any = None
    process: int = field(default_factory=os.getpid)
    is_forked: threading.Event = field(default_factory=threading.Event)

    @property
    def stem(self) -> str:
        return f"rank{self.facts['rank']}.{self.facts['first']}"


class TraceWriter:
    """Does work in a thread that starts with the first piece; failures become warnings."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-traces", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until all is written."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:
                _log.warning("a trace can't be written: %s; the run continues without it", error)


def write_trace(trace: EndedTrace, folder: Path) -> None:
    """Write a trace in a forked process. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if trace.snapshot is not None:
        (folder / f"{trace.stem}.memory.pickle").write_bytes(pickle.dumps(trace.snapshot))
    path = folder / f"{trace.stem}{TRACE_SUFFIX}"
    if not _done_in_child(lambda: _write(trace, path), trace.is_forked):
        _write(trace, path)


def _done_in_child(work: Callable[[], None], is_forked: threading.Event) -> bool:
    """Do work in a forked process; return whether it has succeeded in time."""
    child = os.fork()
    is_forked.set()
    if child == 0:
        status = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            work()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _write(trace: EndedTrace, path: Path) -> None:
    plain, packed = path.with_suffix(".kineto"), path.with_suffix(".part")
    try:
        trace.export(str(plain))
        with plain.open(encoding="utf-8") as source, gzip.open(packed, "wt", 1, encoding="utf-8") as target:
            _add_marks(trace, source, target)
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _add_marks(trace: EndedTrace, source: IO[str], target: IO[str]) -> None:
    """Copy Kineto's JSON with the marks as events, and the facts."""
    header = source.read(_HEADER_CHARS)
    before, begins, after = header.partition(_EVENTS)
    if not begins:
        raise OSError(f"torch's trace has no {_EVENTS} in its first {_HEADER_CHARS:,} characters")
    match = re.search(r'"baseTimeNanoseconds":\s*(\d+)', before)
    base = int(match[1]) if match else 0
    facts = {**trace.facts, "process": trace.process}
    target.write(before.replace("{", f'{{"lockstep": {json.dumps(facts)},', 1) + begins)
    for event in _events(trace, base):
        target.write(json.dumps(event) + ",\n")
    target.write(after)
    while chunk := source.read(_CHUNK):
        target.write(chunk)


def _events(trace: EndedTrace, base: int) -> Iterator[dict[str, Any]]:
    """Yield the updates and phases of the clock as events of a track of its own."""
    track = {"pid": trace.process, "tid": _TRACK}
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
