"""NVIDIA GPUs by their driver (NVML, with the package nvidia-ml-py): load, heat, power, clocks, errors.

    uuid --> handle --> memory, utilization           of the GPU, or of its MIG instance
                  `---> parent of a MIG instance --> temperature, power, clocks, throttling, ECC, Xid

Values that this GPU, driver or user doesn't have are left out. A GPU that the driver has lost gives `gpu_lost: 1`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import named_ranks
from lockstep.core.formatting import listed

if TYPE_CHECKING:
    import torch

THROTTLE_REASONS = {
    0x04: ("power_cap", "its power limit"),
    0x08: ("hardware_slowdown", "a slowdown by the hardware (heat, power or an external signal)"),
    0x10: ("sync_boost", "the slowest GPU of its sync boost group"),
    0x20: ("thermal", "its temperature limit"),
    0x40: ("hardware_thermal", "heat: the hardware halves its clocks"),
    0x80: ("power_brake", "the power supply: an external power brake halves its clocks"),
    0x200: ("board_limit", "a limit of its board"),
    0x400: ("reliability", "its voltage limit for reliability"),
}
"""Reasons by the bit of NVML's nvmlClocksEventReason...: name of the gauge after `gpu_throttled_`, and the reason.

Not there: bits of a GPU that is idle (1), and of clocks that a user (2) or a display (0x100) has set."""

_log = logging.getLogger("lockstep.monitor")
_XID_CRITICAL_ERROR = 0x8  # nvmlEventTypeXidCriticalError
_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU
_CLOCK_SM, _CLOCK_MEMORY = 1, 2  # NVML_CLOCK_...
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0  # NVML_MEMORY_ERROR_TYPE_..., NVML_VOLATILE_ECC: since the driver started
_LOST = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")
_DRIVER_GONE = ("NVMLError_DriverNotLoaded", "NVMLError_Uninitialized", "NVMLError_LibraryNotFound")
_MOST_EVENTS = 100  # read at once
_MOST_HOSTS = 2  # that a line names


class NvmlMissing(Exception):
    """The reason why GPUs can't be read."""


class NvidiaGPU:
    """A GPU, or a MIG instance, by NVML's handle; `nvml` is the initialized module pynvml."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._board = _value(nvml, lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
        self.name = str(_value(nvml, lambda: nvml.nvmlDeviceGetName(handle)) or "NVIDIA GPU")
        self._readers = self._all_readers()
        self._events = self._register()
        self._throttled = 0  # bits of reasons that were seen: a curve returns to 0
        self._xids = 0
        self._last_xid = 0

    def read(self) -> dict[str, float]:
        """Return values in percent, bytes, degrees Celsius, watts, MHz. Raises NvmlMissing if the driver has gone."""
        values: dict[str, float] = {}
        for reader in self._readers:
            try:
                values.update(reader())
            except self._nvml.NVMLError as error:
                kind = type(error).__name__
                if kind in _LOST:
                    return {"gpu_lost": 1.0}
                if kind in _DRIVER_GONE:
                    raise NvmlMissing(f"NVIDIA's driver doesn't answer any longer: {error}") from None
        return values

    def close(self) -> None:
        if self._events is not None:
            _value(self._nvml, lambda: self._nvml.nvmlEventSetFree(self._events))

    def _all_readers(self) -> list[Callable[[], dict[str, float]]]:
        nvml, board = self._nvml, self._board

        def number(name: str, read: Callable[[], Any], unit: float = 1.0) -> Callable[[], dict[str, float]]:
            return lambda: {name: float(read()) * unit}

        def errors(name: str, kind: int) -> Callable[[], dict[str, float]]:
            return number(name, lambda: nvml.nvmlDeviceGetTotalEccErrors(board, kind, _VOLATILE))

        return [
            self._utilization,
            self._memory,
            number("gpu_temperature", lambda: nvml.nvmlDeviceGetTemperature(board, _TEMPERATURE_GPU)),
            number("gpu_power", lambda: nvml.nvmlDeviceGetPowerUsage(board), 1e-3),
            number("gpu_power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(board), 1e-3),
            number("gpu_clock", lambda: nvml.nvmlDeviceGetClockInfo(board, _CLOCK_SM)),
            number("gpu_clock_limit", lambda: nvml.nvmlDeviceGetMaxClockInfo(board, _CLOCK_SM)),
            number("gpu_memory_clock", lambda: nvml.nvmlDeviceGetClockInfo(board, _CLOCK_MEMORY)),
            self._throttling,
            errors("gpu_ecc_corrected", _CORRECTED),
            errors("gpu_ecc_uncorrected", _UNCORRECTED),
            self._xid_errors,
        ]

    def _utilization(self) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"gpu_utilization": float(rates.gpu), "gpu_memory_utilization": float(rates.memory)}

    def _memory(self) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"gpu_memory_used": float(memory.used), "gpu_memory_total": float(memory.total)}

    def _throttling(self) -> dict[str, float]:
        bits = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._board))
        self._throttled |= bits
        seen = {bit: name for bit, (name, _) in THROTTLE_REASONS.items() if self._throttled & bit}
        active = {f"gpu_throttled_{name}": float(bool(bits & bit)) for bit, name in seen.items()}
        return {"gpu_throttled": max(active.values(), default=0.0), **active}

    def _register(self) -> Any:
        nvml = self._nvml
        events = _value(nvml, nvml.nvmlEventSetCreate)
        if events is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(self._board, _XID_CRITICAL_ERROR, events)
        except nvml.NVMLError:
            _value(nvml, lambda: nvml.nvmlEventSetFree(events))
            return None
        return events

    def _xid_errors(self) -> dict[str, float]:
        if self._events is None:
            return {}
        for _ in range(_MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if type(error).__name__ != "NVMLError_Timeout":
                    raise
                break
            self._xids += 1
            self._last_xid = int(event.eventData)
        last = {"gpu_last_xid": float(self._last_xid)} if self._xids else {}
        return {"gpu_xid_errors": float(self._xids), **last}


def nvml_module() -> Any:
    """Return the module pynvml, initialized. Raises NvmlMissing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlMissing(f"the package nvidia-ml-py is missing: {pip_install('nvidia')}") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlMissing(f"NVIDIA's driver can't be asked: {error}") from None
    return nvml


def gpu_of(nvml: Any, uuid: str) -> NvidiaGPU:
    """Return the GPU or MIG instance with a UUID, with or without its prefix. Raises NvmlMissing."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    reason = ""
    for name in names:
        try:
            return NvidiaGPU(nvml, nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError as error:
            reason = reason or str(error)
    raise NvmlMissing(f"NVIDIA's driver doesn't give access to GPU {uuid}: {reason}")


class DeviceGauges:
    """The gauges of the GPU that torch calls `device`, opened in the thread that reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: NvidiaGPU | None = None
        self._missing = False

    def __call__(self) -> dict[str, float]:
        if self._missing:
            return {}
        try:
            if self._gpu is None:
                self._gpu = gpu_of(nvml_module(), uuid_of(self._device))
            return self._gpu.read()
        except NvmlMissing as reason:
            self._missing = True
            _log.warning("utilization, heat, power and errors of %s aren't measured: %s", self._device, reason)
            return {}


def uuid_of(device: torch.device) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_gauges(device: torch.device) -> list[Callable[[], dict[str, float]]]:
    """Return the gauges of a rank's device; none unless it is a GPU by NVIDIA."""
    import torch

    return [DeviceGauges(device)] if device.type == "cuda" and torch.version.cuda is not None else []


def _value(nvml: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except nvml.NVMLError:
        return None


def gpu_facts(gauges: Mapping[str, float]) -> Iterator[str]:
    """Yield what is wrong with a GPU, by its gauges."""
    yield from gpu_errors(gauges)
    for name, reason in THROTTLE_REASONS.values():
        if gauges.get(f"gpu_throttled_{name}"):
            yield f"throttled by {reason}"
    if errors := gauges.get("gpu_ecc_uncorrected"):
        yield f"uncorrected ECC errors of its memory since its driver started: {errors:.0f}; check it"


def gpu_errors(gauges: Mapping[str, float]) -> Iterator[str]:
    """Yield the errors of a GPU."""
    if gauges.get("gpu_lost"):
        yield "no longer answers its driver; check it with nvidia-smi and restart its host"
    if xids := gauges.get("gpu_xid_errors"):
        number = int(gauges.get("gpu_last_xid", 0))
        yield f"Xid error {number} (https://docs.nvidia.com/deploy/xid-errors), number {xids:.0f} of this run"


def gpu_line(hosts: Mapping[int, str], text: str) -> str:
    """Return a line about the GPUs of ranks, by their hosts."""
    return f"GPU of {named_ranks([*hosts])} on {listed([*dict.fromkeys(hosts.values())], _MOST_HOSTS)}: {text}"
