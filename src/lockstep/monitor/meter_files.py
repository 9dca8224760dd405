"""The files of the ranks' meters, written by a thread of rank 0.

live.json, replaced every 2 s while the run trains, has what each rank does now:

    {"time": 1790000000.0, "step": 120, "ranks": [{"rank": 0, "host": "a", "step": 120, "phase": "forward", ...}]}

ranks.jsonl has a line an interval (`monitor.meter_seconds`, longer where there are hundreds of ranks), columns by rank:

    {"step": 120, "time": ..., "seconds": 10.0, "ranks": [0, 1], "step_seconds": [0.05, 0.05], "slowest": [...],
     "split": {"data": [0.001, 0.002], "forward": [...], ...}, "gauges": {"memory_used": [...]}, "stragglers": [...]}
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lockstep.core.files import write_atomically
from lockstep.monitor.gpu_health import last_words
from lockstep.monitor.jsonl import LineFile, finite, line
from lockstep.monitor.rank_meters import POST_S, MeterReport, RankInterval, RankMeters, RankNotice
from lockstep.monitor.run_lock import lock_holder

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.distributed.notice_board import NoticeBoard

LIVE = "live.json"
RANKS = "ranks.jsonl"
_PATIENCE_S = 5.0  # for the thread's end
_SECONDS_PER_RANK = 0.1  # of an interval: a line of 1,024 ranks has 100 KB
_log = logging.getLogger("lockstep.monitor")


class MeterFiles:
    """Collects the notices of all ranks, and writes them.

    Args:
        folder: Of the run.
        interval: Seconds between two lines.

    Attributes:
        reports: Those that the monitors haven't seen yet.
        file: ranks.jsonl.
    """

    def __init__(self, folder: Path, board: NoticeBoard, interval: float, ranks: int) -> None:
        self.file = LineFile(folder / RANKS)
        self.reports: deque[MeterReport] = deque(maxlen=100)
        self._folder = folder
        self._live = folder / LIVE
        self._holder = lock_holder(folder)
        self._board = board
        self._interval = max(interval, ranks * _SECONDS_PER_RANK)
        self._data: list[bytes | None] = [None] * ranks
        self._changed = [0.0] * ranks  # when a rank's notice was another than before
        self._before: dict[int, RankNotice] = {}  # at the last interval's end
        self._began = time.monotonic()

    @property
    def files(self) -> tuple[LineFile, ...]:
        """ranks.jsonl."""
        return (self.file,)

    def look(self, *, last: bool = False) -> None:
        """Read the notices, and write them; a line if the interval is over, or it is the last look.

        Nothing is written in a folder that belongs to another run now, or was deleted.
        """
        now = time.monotonic()
        for rank, data in enumerate(self._board.latest()):
            if data != self._data[rank]:
                self._data[rank], self._changed[rank] = data, now
        notices = {rank: RankNotice.decode(data) for rank, data in enumerate(self._data) if data is not None}
        if not notices:
            return
        ranks = tuple(
            RankInterval.between(self._before.get(rank), notice, now - self._changed[rank])
            for rank, notice in notices.items()
        )
        report = MeterReport(max(notice.step for notice in notices.values()), now - self._began, ranks)
        if not self._is_own():
            return
        self._write_live(report)
        if last or now - self._began >= self._interval:
            self._began, self._before = now, notices
            if any(rank.updates for rank in ranks):
                self.reports.append(report)
                self._append(report)

    def close(self) -> None:
        """Remove live.json: the run has ended."""
        self.file.close()
        if self._is_own():
            with suppress(OSError):
                self._live.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        return lock_holder(self._folder) == self._holder

    def _append(self, report: MeterReport) -> None:
        if not self.file.write(line(_columns(report))) and self.file.lost == 1:
            _log.warning("can't write %s: %s; the run continues without those lines", self.file.path, self.file.reason)

    def _write_live(self, report: MeterReport) -> None:
        text = json.dumps(finite(_live(report)), allow_nan=False)
        with suppress(OSError):  # the warnings on the run's other files are enough
            write_atomically(self._live, text + "\n", durable=False)


class MeterThread:
    """Posts this rank's meters, and collects those of all ranks on the first one.

    Args:
        files: None on other ranks than the first.
    """

    def __init__(self, meters: RankMeters, files: MeterFiles | None, seconds: float = POST_S) -> None:
        self._meters = meters
        self._files = files
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-meters", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which posts for the last time.

        A thread that waits for a device or a file system without an answer is left alone: the run ends without it.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=_PATIENCE_S)

    def finish(self) -> None:
        """Collect what all ranks have posted, and close the files."""
        self.stop()
        if self._files is not None and self._thread.is_alive():
            _log.warning("the meters of this rank don't answer; the run ends without the last ones")
        elif self._files is not None:
            with suppress(RuntimeError):
                self._files.look(last=True)
            self._files.close()

    def _run(self) -> None:
        try:
            notice = self._meters.notice()
            with suppress(RuntimeError):  # the ranks' store has ended
                self._meters.post(notice)
                while not self._ended.wait(self._seconds):
                    notice = self._meters.notice()
                    self._meters.post(notice)
                    if self._files is not None:
                        self._files.look()
            last = self._meters.notice()
            for text in last_words(notice, last):  # which may be why this rank ends
                _log.error("%s", text)
            with suppress(RuntimeError):
                self._meters.post(last)
        except Exception:
            _log.warning("the meters of this rank have failed; the run continues without them", exc_info=True)


def _live(report: MeterReport) -> dict[str, Any]:
    return {
        "time": time.time(),
        "step": report.step,
        "ranks": [
            {
                "rank": rank.notice.rank,
                "host": rank.notice.host,
                "process": rank.notice.process,
                "step": rank.notice.step,
                "phase": rank.notice.phase.name.lower(),
                "phase_seconds": round(rank.notice.phase_seconds + rank.silent, 3),
                "silent": round(rank.silent, 3),
                "step_seconds": rank.seconds,
                "slowest": rank.slowest,
                "split": rank.split,
                "gauges": rank.notice.gauges,
            }
            for rank in report.ranks
        ],
        "stragglers": [asdict(straggler) for straggler in report.stragglers()],
    }


def _columns(report: MeterReport) -> dict[str, Any]:
    ranks = report.ranks
    splits = dict.fromkeys(name for rank in ranks for name in rank.split)
    gauges = dict.fromkeys(name for rank in ranks for name in rank.notice.gauges)
    return {
        "step": report.step,
        "time": round(time.time(), 3),
        "seconds": round(report.seconds, 3),
        "ranks": [rank.notice.rank for rank in ranks],
        "updates": [rank.updates for rank in ranks],
        "step_seconds": [_short(rank.seconds) for rank in ranks],
        "median": [_short(rank.median) for rank in ranks],
        "slowest": [_short(rank.slowest) for rank in ranks],
        "deviation": [_short(rank.deviation) for rank in ranks],
        "split": {name: [_short(rank.split.get(name)) for rank in ranks] for name in splits},
        "gauges": {name: [_short(rank.notice.gauges.get(name)) for rank in ranks] for name in gauges},
        "stragglers": [asdict(straggler) for straggler in report.stragglers()],
    }


def _short(value: float | None) -> float | None:
    """Return a number with six digits; None if it isn't known."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
