"""All NVIDIA GPUs that this process sees, read by a thread: history, and min, mean and max of each value.

with GPUMonitor(seconds=1.0) as gpus:
    ...                                 thread: read, every second --> history
print(gpus.summary())
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from lockstep.monitor.nvidia import NvidiaGPU, NvmlMissing, gpu_of, nvml_module

_END_S = 5.0  # for the thread's end


class ValueRange(NamedTuple):
    """The range of a value over time."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class GPUSample:
    """The values of a GPU at a moment.

    Attributes:
        time: Unix time.
        gpu: Number among the GPUs that this process sees.
        values: By name: `gpu_utilization` in percent, `gpu_temperature` in degrees Celsius, `gpu_power` in watts, ...
    """

    time: float
    gpu: int
    values: Mapping[str, float]


class GPUMonitor:
    """Reads all GPUs every `seconds` between entering and leaving its block.

    On a machine without NVIDIA GPUs, or without the package nvidia-ml-py, it reads nothing, and `reason` states why.

    Args:
        seconds: Between two readings.
        kept: Number of newest readings of each GPU in the history.

    Attributes:
        names: Of the GPUs.
        reason: Why there is nothing to read; empty otherwise.
    """

    def __init__(self, seconds: float = 1.0, kept: int = 3600) -> None:
        if not seconds > 0 or kept < 1:
            raise ValueError(f"GPUMonitor reads every {seconds:g} s and keeps {kept} readings; both must be above 0")
        self._seconds = seconds
        self._gpus: list[NvidiaGPU] = []
        self._samples: list[deque[GPUSample]] = []
        self._kept = kept
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.names: list[str] = []
        self.reason = "it was not started: write `with GPUMonitor() as gpus:`"

    def __enter__(self) -> GPUMonitor:
        try:
            self._gpus = _visible_gpus()
            self.reason = "" if self._gpus else "this process sees no NVIDIA GPU"
        except NvmlMissing as missing:
            self.reason = str(missing)
        self.names = [gpu.name for gpu in self._gpus]
        self._samples = [deque(maxlen=self._kept) for _ in self._gpus]
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
        """Return the readings so far, in the order of time."""
        with self._lock:
            return sorted((sample for samples in self._samples for sample in samples), key=lambda sample: sample.time)

    def summary(self) -> dict[int, dict[str, ValueRange]]:
        """Return min, mean and max of each value over the history, by GPU; nothing without GPUs."""
        with self._lock:
            of_gpus = [list(samples) for samples in self._samples]
        return {number: _ranges(samples) for number, samples in enumerate(of_gpus)}

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
                    values = gpu.read()
                except NvmlMissing as missing:
                    self.reason = str(missing)
                    return
                with self._lock:
                    self._samples[number].append(GPUSample(time.time(), number, values))
            if self._ended.wait(self._seconds):
                break
        for gpu in self._gpus:
            gpu.close()


_SHOWN = (
    ("gpu_utilization", "utilization", "%"),
    ("gpu_temperature", "temperature", "C"),
    ("gpu_power", "power", "W"),
)


def _ranges(samples: list[GPUSample]) -> dict[str, ValueRange]:
    names = dict.fromkeys(name for sample in samples for name in sample.values)
    values = {name: [sample.values[name] for sample in samples if name in sample.values] for name in names}
    return {name: ValueRange(min(of_name), statistics.fmean(of_name), max(of_name)) for name, of_name in values.items()}


def _visible_gpus() -> list[NvidiaGPU]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or all. Raises NvmlMissing."""
    nvml = nvml_module()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [_gpu_at(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    gpus: list[NvidiaGPU] = []
    for word in visible.split(","):
        name = word.strip()
        if name.startswith(("GPU-", "MIG-")):
            gpus.append(gpu_of(nvml, name))
        elif name.isdigit() and int(name) < nvml.nvmlDeviceGetCount():
            gpus.append(_gpu_at(nvml, int(name)))
        else:  # as CUDA does: what follows isn't seen
            break
    return gpus


def _gpu_at(nvml: Any, number: int) -> NvidiaGPU:
    try:
        return NvidiaGPU(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
    except nvml.NVMLError as error:
        raise NvmlMissing(f"NVIDIA's driver doesn't give access to GPU {number}: {error}") from None
