"""The flight records of ranks that don't move, as a thread of each rank writes them on request.

    launcher -- bell --> a thread of the rank: torch's flight record, other threads' stacks --> its file --> launcher

A rank that holds the interpreter's lock, or is stopped, writes none.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lockstep.core.files import write_atomically
from lockstep.core.heartbeat import RECORDS, Heartbeat
from lockstep.core.pending_collective import PendingCollective

FOLDER = "flight_record"
_REQUEST = 1
_LEAVE = 1 << 32
_LENGTH = 8
_WAIT_S = 0.1
_LOOK_S = 0.005
_MOST_FRAMES = 100  # of a thread, as of faulthandler


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The last collectives of a rank.

    Attributes:
        pending: Those that aren't complete, the oldest first.
        content: The whole record, as torchfrtrace reads it.
        threads: The stacks of the rank's threads but the main one, as faulthandler writes them.
    """

    pending: Sequence[PendingCollective]
    content: bytes
    threads: str = ""


# --- in a rank --------------------------------------------------------------------------------------------------------


def answer_requests(beat: Heartbeat) -> threading.Thread:
    """Let a thread write this rank's flight record whenever it is requested; return the thread."""
    beat.numbers[RECORDS] = 1
    thread = threading.Thread(target=_answer, args=(beat,), name="flight record", daemon=True)
    thread.start()
    return thread


def answer_no_more(beat: Heartbeat) -> None:
    """Let the thread end."""
    beat.numbers[RECORDS] = 0
    _ring(beat, _LEAVE)


def _answer(beat: Heartbeat) -> None:
    while int.from_bytes(os.read(beat.files.bell, _LENGTH), sys.byteorder) < _LEAVE:
        threads = _stacks_of_others()
        try:
            pending, content = _record()
        except Exception:  # torch's records are another version's: the stacks are there
            pending, content = [], traceback.format_exc().encode()
        os.ftruncate(beat.files.record, 0)
        os.pwrite(beat.files.record, json.dumps([pending, threads]).encode() + b"\n" + content, 0)
        beat.numbers[RECORDS] += 1


def _stacks_of_others() -> str:
    """Return the stacks of all threads but the main one and this one."""
    stacks = []
    for thread, frame in sys._current_frames().items():
        if thread not in (threading.get_ident(), threading.main_thread().ident):
            lines = [f"Thread 0x{thread:016x} (most recent call first):"]
            code: FrameType | None = frame
            while code is not None and len(lines) <= _MOST_FRAMES:
                lines.append(f'  File "{code.f_code.co_filename}", line {code.f_lineno} in {code.f_code.co_name}')
                code = code.f_back
            stacks.append("\n".join(lines))
    return "\n\n".join(stacks)


def _record() -> tuple[list[PendingCollective], bytes]:
    if "torch.distributed" not in sys.modules:
        return [], b""
    from lockstep.distributed.flight_record import flight_record

    return flight_record()


# --- in the launcher --------------------------------------------------------------------------------------------------


def request_records(beats: Mapping[int, Heartbeat]) -> dict[int, float]:
    """Request the flight records of some ranks; return by rank how many they have written until now."""
    written = {rank: beat.numbers[RECORDS] for rank, beat in beats.items() if beat.numbers[RECORDS]}
    for rank in written:
        _ring(beats[rank], _REQUEST)
    return written


def read_records(beats: Mapping[int, Heartbeat], before: Mapping[int, float]) -> dict[int, FlightRecord]:
    """Return the records that were requested, by rank. They are waited for only a moment: a rank may write none.

    Args:
        before: What `request_records` has returned.
    """
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until and any(beats[rank].numbers[RECORDS] == number for rank, number in before.items()):
        time.sleep(_LOOK_S)
    return {rank: _read(beats[rank]) for rank, written in before.items() if beats[rank].numbers[RECORDS] != written}


def save_records(logs: Path, records: Mapping[int, FlightRecord], seconds: float) -> None:
    """Write the records into a folder of the run's logs, a file for each rank, instead of earlier ones.

    Args:
        seconds: How long none of them has changed: an older file is of another hang, maybe of more ranks.
    """
    folder = logs / FOLDER
    with suppress(OSError):
        if records:
            folder.mkdir(exist_ok=True)
        _remove_older(folder, seconds)
        for rank, record in records.items():
            write_atomically(folder / f"rank_{rank}", record.content, durable=False)


def _remove_older(folder: Path, seconds: float) -> None:
    os.utime(folder)  # by the clock of its file system, as those of the files that other hosts write
    oldest = folder.stat().st_mtime - seconds
    for path in folder.glob("*rank_*"):
        with suppress(FileNotFoundError):  # another host has removed it
            if path.lstat().st_mtime < oldest:
                path.unlink()


def _read(beat: Heartbeat) -> FlightRecord:
    line, _, content = os.pread(beat.files.record, os.fstat(beat.files.record).st_size, 0).partition(b"\n")
    with suppress(ValueError, TypeError):
        pending, threads = json.loads(line)
        return FlightRecord([PendingCollective(*fields) for fields in pending], content, threads)
    return FlightRecord((), content)


def _ring(beat: Heartbeat, number: int) -> None:
    os.write(beat.files.bell, number.to_bytes(_LENGTH, sys.byteorder))
