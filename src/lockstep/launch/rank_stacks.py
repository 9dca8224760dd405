"""The stacks of ranks that don't move, as their main threads write them on a signal.

    launcher -- STACKS_SIGNAL --> faulthandler in the rank, in C, also while the interpreter's lock is held
             <-- its file ------- File "model.py", line 33 in forward ...

A stopped process writes none; nor does one that waits in the kernel for a disk that doesn't answer. The main thread
writes only its own: without the interpreter's lock, the stack of a thread that runs may be freed while it is read.
`flight_records` has those of the others.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lockstep.core.heartbeat import READY, Heartbeat
from lockstep.core.stopping import STACKS_SIGNAL

_WAIT_S = 0.5
_QUIET_S = 0.02
_PY_SPY_S = 5.0
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


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_shown(self.file)}:{self.line} in {self.function}"


def answer_signal(file: int) -> None:
    """Let this process's main thread write its stack into a file when it is requested."""
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False)


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
    return {
        process: os.pread(files[process], sizes[process] - start, start).decode(errors="replace").strip()
        for process, start in began.items()
    }


def _signal_main_thread(process: int) -> None:
    """Request its stack. A signal for the process may be taken by another thread while one is pending on this one."""
    signal_thread = getattr(ctypes.CDLL(None), "tgkill", None)  # since glibc 2.30
    if signal_thread is not None:
        signal_thread(process, process, STACKS_SIGNAL)
        return
    with suppress(ProcessLookupError):
        os.kill(process, STACKS_SIGNAL)


def stacks_from_outside(processes: Sequence[int]) -> dict[int, str]:
    """Return the stacks of stopped processes, if py-spy is installed and may read them; of all at the same time."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return {}
    stacks: dict[int, str] = {}
    until = time.monotonic() + _PY_SPY_S
    with suppress(OSError), ExitStack() as opened:
        dumps = {process: _dump(program, process, opened) for process in processes}
        for process, (output, dump) in dumps.items():
            with suppress(subprocess.TimeoutExpired):
                dump.wait(max(0.0, until - time.monotonic()))
                stacks[process] = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace").strip()
    return stacks


def _dump(program: str, process: int, opened: ExitStack) -> tuple[int, subprocess.Popen[bytes]]:
    """Start py-spy for a process; return the file that it writes into, and itself. It ends with what is opened."""
    with tempfile.TemporaryFile() as file:
        output = os.dup(file.fileno())
    opened.callback(os.close, output)
    command = [program, "dump", "--nonblocking", "--pid", str(process)]
    dump = opened.enter_context(subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL))
    opened.callback(dump.kill)
    return output, dump


def raising_line(text: str) -> Frame | None:
    """Return the line at which the exception of a traceback was raised, as `line_of` does; None if there is none."""
    _, begins, traceback = text.rpartition("Traceback (")
    return line_of(_frames(traceback)[::-1]) if begins else None


def _frames(text: str) -> list[Frame]:
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(text)]


def main_frames(text: str) -> list[Frame]:
    """Return the frames of the main thread, the innermost first, without those below a rank's entry."""
    threads = _threads(text)
    frames = _frames("".join(threads[:1]))
    names = [frame.function for frame in frames]
    return frames[: names.index(_ENTRY)] if _ENTRY in names else frames


def main_first(text: str) -> str:
    """Return the stacks with the main thread's first."""
    return "\n".join(_threads(text)) or text


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
        marked: Whether its clock is in a collective: that of a backward in C++ shows no other frame than torch's.
    """
    if not frames:
        return marked
    innermost = frames[0].file
    return any(part in innermost for part in _WAITS) or (marked and "/torch/" in innermost)


def compiles(frames: Sequence[Frame]) -> bool:
    """Return whether the rank compiles or imports."""
    return any(_COMPILES.search(frame.file) for frame in frames)


def is_debugged(frames: Sequence[Frame]) -> bool:
    """Return whether a debugger runs in the rank."""
    return any(_DEBUGS.search(frame.file) for frame in frames)


def process_state(process: int) -> str:
    """Return the kernel's letter for the state of a process, such as T (stopped); empty if it isn't known."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def seconds_without_processor(process: int) -> float:
    """Return for how long the process has waited for a processor until now, by the thread that has most."""
    longest = 0
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            longest = max(longest, int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[1]))
    except (OSError, IndexError, ValueError):
        pass
    return longest / 1e9


def _threads(text: str) -> list[str]:
    """Return the stacks of the threads, the main one's first: a rank's has its entry, and receives the signal."""
    starts = [match.start() for match in _THREAD.finditer(text)]
    threads = [text[start:end].strip() + "\n" for start, end in pairwise([*starts, len(text)])] if starts else []
    return sorted(
        threads, key=lambda thread: (f" in {_ENTRY}\n" not in thread, not thread.startswith(("Current", "Stack")))
    )


def _shown(file: str) -> str:
    if file.startswith(_OWN):
        return file.removeprefix(_ABOVE_OWN)
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
