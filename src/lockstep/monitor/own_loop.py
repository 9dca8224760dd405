"""Tools for any training loop: the speed of its steps, its GPUs, and a logger for each rank."""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from lockstep.core.phase_clock import Durations
from lockstep.monitor.nvidia import NvidiaGPU, NvmlMissing, gpu_of, nvml_module

_FORMAT = "%(asctime)s %(levelname)-7s rank {rank}/{size} %(name)s: %(message)s"
_END_S = 5.0  # for the thread's end
_SHOWN = (
    ("gpu_utilization", "utilization", "%"),
    ("gpu_temperature", "temperature", "C"),
    ("gpu_power", "power", "W"),
)


@dataclass(frozen=True, slots=True)
class ThroughputAverage:
    """The speed over some steps; NaN where there were none. `deviation` is of a single step's seconds."""

    steps: int
    seconds: float
    step_seconds: float
    deviation: float
    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float


class ThroughputTracker:
    """Measures the steps of a loop on this rank.

    On a GPU, the host runs ahead of the device by some steps: use averages over tens of steps.

        tracker.start()  step  step  step  step      (evaluation)  tracker.start()  step  step
                         |<-- window: average() -->|  not counted  |<-- measured -->|

    Args:
        window: Number of newest steps that `average` covers.
    """

    def __init__(self, window: int = 50, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._window: deque[tuple[float, float, float]] = deque(maxlen=window)  # seconds, samples, tokens
        self._since: float | None = None
        self.reset()

    def start(self) -> None:
        """Begin a step now; call it before the first step, and after a pause."""
        self._since = self._now()

    def step(self, samples: float = 0, tokens: float = 0) -> float:
        """End a step that consumed `samples` and `tokens`, and begin the next; return its seconds."""
        if self._since is None:
            raise RuntimeError("ThroughputTracker.step was called before start; call start() before the loop")
        now = self._now()
        seconds, self._since = now - self._since, now
        self._window.append((seconds, samples, tokens))
        self._durations.add(seconds)
        return seconds

    def average(self) -> ThroughputAverage:
        """Return the speed over the window."""
        if not self._window:
            return ThroughputAverage(0, 0.0, *(math.nan,) * 5)
        durations, samples, tokens = zip(*self._window, strict=True)
        steps, seconds = len(durations), math.fsum(durations)
        return ThroughputAverage(
            steps,
            seconds,
            seconds / steps,
            statistics.pstdev(durations),
            steps / seconds,
            sum(samples) / seconds,
            sum(tokens) / seconds,
        )

    def percentiles(self, *shares: float) -> dict[float, float]:
        """Return the seconds that these shares of all steps don't exceed, to 1 %; by default of 0.5, 0.95 and 0.99."""
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"ThroughputTracker.percentiles: shares are from 0 to 1 (0.95), not {shares}")
        return {share: self._durations.percentile(share) for share in shares or (0.5, 0.95, 0.99)}

    def reset(self) -> None:
        """Forget all steps, such as the warmup's. A step that has begun continues."""
        self._window.clear()
        self._durations = Durations()


def rank_logger(
    name: str = "train",
    folder: str | os.PathLike[str] | None = None,
    level: int | str = "INFO",
    *,
    console: int | None = 0,
    max_bytes: int = 10_000_000,
    backups: int = 3,
) -> logging.Logger:
    """Return this rank's logger; each line has time, level, rank and number of ranks.

    A second call with the same name replaces the handlers of the first.

    Args:
        folder: For rank-0.log, rank-1.log, ...; None: no files.
        console: The rank that also prints to standard error; None: no rank does.
        max_bytes: Size when a file is renamed to rank-0.log.1, and begun again.
        backups: Number of renamed files to keep.
    """
    from lockstep.distributed.user_collectives import rank_and_size  # it imports torch

    rank, size = rank_and_size()
    logger = logging.getLogger(name)
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    handlers: list[logging.Handler] = []
    if folder is not None:
        path = Path(folder) / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8"))
    if console == rank:
        handlers.append(logging.StreamHandler(sys.stderr))
    formatter = logging.Formatter(_FORMAT.format(rank=rank, size=size))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.propagate = False  # the root logger would print on every rank
    return logger


class ValueRange(NamedTuple):
    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class GPUSample:
    """The values of a GPU (its number among the visible ones) at a Unix time, such as `gpu_power` in watts."""

    time: float
    gpu: int
    values: Mapping[str, float]


class GPUMonitor:
    """Reads all GPUs every `seconds` between entering and leaving its block.

    On a machine without NVIDIA GPUs, or without the package nvidia-ml-py, it reads nothing, and `reason` says why.

    Args:
        kept: Number of newest readings of each GPU in the history.
    """

    def __init__(self, seconds: float = 1.0, kept: int = 3600) -> None:
        if not seconds > 0 or kept < 1:
            raise ValueError(f"GPUMonitor reads every {seconds:g} s and keeps {kept} readings; both must be above 0")
        self._seconds = seconds
        self._kept = kept
        self._gpus: list[NvidiaGPU] = []
        self._samples: deque[GPUSample] = deque()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.names: list[str] = []
        self.reason = "it was not started: write `with GPUMonitor() as gpus:`"

    def __enter__(self) -> GPUMonitor:
        try:
            self._gpus = _visible_gpus()
            self.reason = "" if self._gpus else "this process sees no NVIDIA GPU"
        except NvmlMissing as missing:
            self.reason = str(missing)
        self.names = [gpu.name for gpu in self._gpus]
        self._samples = deque(maxlen=self._kept * len(self._gpus))
        if self._gpus:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="lockstep-gpus", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=_END_S)

    def history(self) -> list[GPUSample]:
        return list(self._samples.copy())  # which no thread can interrupt

    def summary(self) -> dict[int, dict[str, ValueRange]]:
        """Return min, mean and max of each value over the history, by GPU."""
        values: dict[int, dict[str, list[float]]] = {number: {} for number in range(len(self._gpus))}
        for sample in self.history():
            for name, value in sample.values.items():
                values[sample.gpu].setdefault(name, []).append(value)
        return {
            gpu: {name: ValueRange(min(part), statistics.fmean(part), max(part)) for name, part in of_gpu.items()}
            for gpu, of_gpu in values.items()
        }

    def __str__(self) -> str:
        if self.reason:
            return f"no GPU is read: {self.reason}"
        lines = []
        for number, ranges in self.summary().items():
            shown = [
                f"{label} {ranges[name].mean:.0f} {unit} (max {ranges[name].max:.0f})"
                for name, label, unit in _SHOWN
                if name in ranges
            ]
            lines.append(f"GPU {number}, {self.names[number]}: {', '.join(shown) or 'nothing was read'}")
        return "\n".join(lines)

    def _run(self) -> None:
        while True:
            for number, gpu in enumerate(self._gpus):
                try:
                    self._samples.append(GPUSample(time.time(), number, gpu.read()))
                except NvmlMissing as missing:
                    self.reason = str(missing)
                    return
            if self._ended.wait(self._seconds):
                break
        for gpu in self._gpus:
            gpu.close()


def _visible_gpus() -> list[NvidiaGPU]:
    nvml = nvml_module()
    count, visible = nvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus: list[NvidiaGPU] = []
    for name in map(str, range(count)) if visible is None else map(str.strip, visible.split(",")):
        if name.startswith(("GPU-", "MIG-")):
            gpus.append(gpu_of(nvml, name))
        elif name.isdigit() and int(name) < count:
            try:
                gpus.append(NvidiaGPU(nvml, nvml.nvmlDeviceGetHandleByIndex(int(name))))
            except nvml.NVMLError as error:
                raise NvmlMissing(f"NVIDIA's driver doesn't give access to GPU {name}: {error}") from None
        else:  # as CUDA does: what follows isn't seen
            break
    return gpus
