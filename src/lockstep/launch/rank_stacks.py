"""Stacks and flight records of ranks that don't move, as they write them on request.

    launcher -- STACKS_SIGNAL --> faulthandler in the rank, in C, also while the interpreter's lock is held
             <-- its file ------- File "model.py", line 33 in forward ...
    launcher -- bell --> a thread of the rank: collectives that aren't complete, other threads' stacks --> its file

The log of a rank that has died of an abort or a crash ends with the reason that C++ code has printed, and a stack.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lockstep.core.files import opened_regular
from lockstep.core.heartbeat import READY, RECORDS, Heartbeat
from lockstep.core.secrets import shareable
from lockstep.core.stopping import STACKS_SIGNAL
from lockstep.launch.ends import End

_WAIT_S, _RECORD_S = 0.5, 0.1
_QUIET_S, _LOOK_S = 0.02, 0.005
_MOST_FRAMES = 100  # of a thread, as of faulthandler
_MOST_REQUESTS = 64
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack \(most)", re.MULTILINE)
_OWN = str(Path(__file__).parents[1]) + os.sep
_ABOVE_OWN = str(Path(__file__).parents[2]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = re.compile(r"/(site|dist)-packages/")
_ENTRY = "run_rank"  # below it are the launcher's frames, which the rank was forked with
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/lockstep/distributed/", "/deepspeed/comm/")
_COMPILES = re.compile(
    r"/torch/_dynamo/(convert_frame|symbolic_convert|output_graph|variables/)|/torch/_inductor/(compile_fx|graph|scheduler"
    r"|codegen/|async_compile|lowering|ir\.py|fx_passes/)|/triton/compiler/|/torch/utils/cpp_extension|importlib\._bootstrap"
)
_DEBUGS = re.compile(r"/(bdb|pdb)\.py$|/pydevd|/debugpy/|/IPython/terminal/")

_DEATHS = (-signal.SIGABRT, -signal.SIGSEGV)
_MOST_BYTES, _MOST_CHARACTERS = 2**18, 300
_FATAL = "Fatal Python error: "
_REASON = re.compile(  # in a time that grows with the length of a line, not with its square
    r"^ *what\(\): +(?P<what>.+)$|^(?P<other>terminate called .+|libc\+\+abi: .+|(?>.*?Assertion ).* failed.*"
    r"|free\(\): .+|malloc\(\): .+|double free .+|corrupted .+|\*\*\* .+ \*\*\*.*)$",
    re.MULTILINE,
)
_MISMATCH = re.compile(r"data size doesn't match expected size|collective mismatch")


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_shown(self.file)}:{self.line} in {self.function}"


# --- in a rank --------------------------------------------------------------------------------------------------------


def answer_requests(beat: Heartbeat) -> None:
    """Let this process write its stack and flight record whenever they are requested."""
    faulthandler.register(STACKS_SIGNAL, file=beat.files.stacks, all_threads=False)
    threading.Thread(target=_answer, args=(beat,), name="flight record", daemon=True).start()
    beat.numbers[READY] = 1


def _answer(beat: Heartbeat) -> None:
    while os.read(beat.files.bell, _MOST_REQUESTS):
        threads = _stacks_of_others()
        try:
            pending, on_device, content = _record()
        except Exception:  # torch's records are another version's: the stacks are there
            pending, on_device, content = [], False, traceback.format_exc().encode()
        os.ftruncate(beat.files.record, 0)
        os.pwrite(beat.files.record, json.dumps([pending, on_device, threads]).encode() + b"\n" + content, 0)
        beat.numbers[RECORDS] += 1


def _stacks_of_others() -> str:
    """Return the stacks of all threads but the main one and this one."""
    own = (threading.get_ident(), threading.main_thread().ident)
    stacks = {thread: frame for thread, frame in sys._current_frames().items() if thread not in own}
    texts = {thread: "".join(traceback.format_stack(frame, _MOST_FRAMES)) for thread, frame in stacks.items()}
    return "\n".join(f"Thread 0x{thread:016x} (most recent call last):\n{text}" for thread, text in texts.items())


def _record() -> tuple[list[str], bool, bytes]:
    if "torch.distributed" not in sys.modules:
        return [], False, b""
    from lockstep.distributed.flight_record import flight_record

    return flight_record()


# --- in the launcher --------------------------------------------------------------------------------------------------


class FlightRecord(NamedTuple):
    """The last collectives of a rank, and the stacks of its other threads.

    Attributes:
        pending: Collectives that aren't complete, the oldest first.
        on_device: Whether a device makes them, and the host doesn't wait for them, as under NCCL.
        content: The whole record, as torchfrtrace reads it.
    """

    pending: Sequence[str] = ()
    on_device: bool = False
    threads: str = ""
    content: bytes = b""


def flight_records(beats: Mapping[int, Heartbeat]) -> dict[int, FlightRecord]:
    """Return the flight records of some ranks. They are waited for only a moment: a rank may write none."""
    written = {rank: beat.numbers[RECORDS] for rank, beat in beats.items() if beat.numbers[READY]}
    for rank in written:
        os.write(beats[rank].files.ring, b"!")
    until = time.monotonic() + _RECORD_S
    while time.monotonic() < until and any(beats[rank].numbers[RECORDS] == number for rank, number in written.items()):
        time.sleep(_LOOK_S)
    return {rank: _read(beats[rank]) for rank, number in written.items() if beats[rank].numbers[RECORDS] != number}


def _read(beat: Heartbeat) -> FlightRecord:
    line, _, content = os.pread(beat.files.record, os.fstat(beat.files.record).st_size, 0).partition(b"\n")
    with suppress(ValueError, TypeError):  # it is being written
        pending, on_device, threads = json.loads(line)
        return FlightRecord(pending, on_device, threads, content)
    return FlightRecord()


def write_stacks(processes: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Let processes write their stacks; return what each has written, by process. A rank's workers share its file."""
    files = {process: beat.files.stacks for process, beat in processes.items() if beat.numbers[READY]}
    began = {process: os.fstat(file).st_size for process, file in files.items()}
    for process in began:
        _signal_main_thread(process)
    sizes, until, changed = dict(began), time.monotonic() + _WAIT_S, time.monotonic()
    while time.monotonic() < until:
        time.sleep(_QUIET_S)
        now = {process: os.fstat(files[process]).st_size for process in began}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        elif all(sizes[process] > began[process] for process in began) and time.monotonic() - changed > _QUIET_S:
            break
    written = {process: os.pread(files[process], sizes[process] - start, start) for process, start in began.items()}
    return {process: text.decode(errors="replace").strip() for process, text in written.items()}


def _signal_main_thread(process: int) -> None:
    """Request its stack. A signal for the process may be taken by another thread while one is pending on this one."""
    signal_thread = getattr(ctypes.CDLL(None), "tgkill", None)  # since glibc 2.30
    if signal_thread is not None:
        signal_thread(process, process, STACKS_SIGNAL)
        return
    with suppress(ProcessLookupError):
        os.kill(process, STACKS_SIGNAL)


def raising_line(text: str) -> Frame | None:
    """Return the line that raised the exception of a traceback, in the form of `line_of`; None if there is none."""
    _, begins, frames = text.rpartition("Traceback (")
    return line_of(_frames(frames)[::-1]) if begins else None


def _frames(text: str) -> list[Frame]:
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(text)]


def main_frames(text: str) -> list[Frame]:
    """Return the frames of the main thread, the innermost first, without those below a rank's entry."""
    frames = _frames("".join(_threads(text)[:1]))
    names = [frame.function for frame in frames]
    return frames[: names.index(_ENTRY)] if _ENTRY in names else frames


def line_of(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of a user's code; without one, of Lockstep's above its collectives; or of all."""
    here = [frame for frame in frames if not _PACKAGES.search(frame.file) and not frame.file.startswith((_STDLIB, "<"))]
    users = [frame for frame in here if not frame.file.startswith(_OWN)]
    own = [frame for frame in here if "/lockstep/distributed/" not in frame.file]
    return next(iter([*users, *own, *frames]), None)


def waits_for_accelerator(frames: Sequence[Frame]) -> bool:
    """Return whether the rank waits until its accelerator has done what it was given, by its stack."""
    return bool(frames) and frames[0].function == "synchronize" and "/torch/" in frames[0].file


def waits_in_collective(frames: Sequence[Frame], *, marked: bool) -> bool:
    """Return whether the rank waits for others, by its stack.

    Args:
        marked: Whether its clock is in a collective: a backward's in C++ shows only who called autograd.
    """
    if not frames:
        return marked
    innermost, function = frames[0].file, frames[0].function
    in_backward = "/torch/" in innermost or function == "run_backward"
    return any(part in innermost for part in _WAITS) or (marked and in_backward)


def compiles(frames: Sequence[Frame]) -> bool:
    """Return whether the rank compiles or imports."""
    return any(_COMPILES.search(frame.file) for frame in frames)


def is_debugged(frames: Sequence[Frame]) -> bool:
    """Return whether a debugger runs in the rank."""
    return any(_DEBUGS.search(frame.file) for frame in frames)


def _threads(text: str) -> list[str]:
    """Return the stacks of the threads, the main one's first: a rank's has its entry, and receives the signal."""
    starts = [match.start() for match in _THREAD.finditer(text)]
    threads = [text[start:end].strip() + "\n" for start, end in pairwise([*starts, len(text)])] if starts else []
    current = ("Current", "Stack")
    return sorted(threads, key=lambda thread: (f" in {_ENTRY}\n" not in thread, not thread.startswith(current)))


def _shown(file: str) -> str:
    if file.startswith(_OWN):
        return file.removeprefix(_ABOVE_OWN)
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


# --- in the log of a rank that has died ------------------------------------------------------------------------------


def with_last_words(end: End, log: Path, began: int) -> End:
    """Return the end of a rank with what its log states about its death; `began`: its size before the rank started."""
    if end.status not in _DEATHS:
        return end
    try:
        with opened_regular(log) as handle:
            size = os.fstat(handle).st_size
            start = max(began, size - _MOST_BYTES)
            text = os.pread(handle, max(0, size - start), start).decode("utf-8", "replace")
    except OSError:
        return end
    words = _words(text)
    return replace(end, text=f"{end.text}: {words}") if words else end


def _words(log: str) -> str:
    printed, fatal, stacks = log.rpartition(_FATAL) if _FATAL in log else (log, "", "")
    matches = [*_REASON.finditer(printed)]
    whats = [match["what"] for match in matches if match["what"]] or [match[0] for match in matches]
    reason = shareable(whats[-1].strip())[:_MOST_CHARACTERS] if whats else ""
    line = line_of(main_frames(stacks.partition("\n")[2])) if fatal else None
    mismatch = "the ranks called different collectives, or with tensors of different sizes"
    parts = [mismatch if _MISMATCH.search(reason) else "", f"at {line}" if line is not None else "", reason]
    return ", ".join(filter(None, parts))
