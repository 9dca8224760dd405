"""Gauges of the host and of this rank's process: processor, memory, the run's file system, network.

They are read in the meters' thread: a file system that doesn't answer keeps that thread waiting, not the training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from lockstep.core.control_groups import tightest_limit
from lockstep.core.processes import waited_for_core

Gauges = Callable[[], Mapping[str, float]]
_BLOCK_DEVICES = Path("/sys/dev/block")


def host_gauges(folder: Path, block_devices: Path = _BLOCK_DEVICES) -> list[Gauges]:
    """Return the gauges of the host, by what can fail without the others.

        cpu_percent                            of this process; 100 is one core
        core_wait_percent                      of its time, the main thread waits for a core that others have (Linux)
        host_cpu_percent                       of all cores together, 0 to 100
        host_memory_used, host_memory_free     bytes; free is what the control group leaves, too
        host_swap_used                         bytes
        disk_free                              bytes of the run's file system that this user may fill
        disk_read_rate, disk_write_rate        bytes a second of its disk, by all processes; missing where it has none
                                               (NFS, tmpfs, overlays)
        network_sent_rate, network_received_rate   bytes a second of all interfaces but loopback

    Args:
        folder: On the run's file system.
        block_devices: Links from the numbers of disks to their names.
    """
    disk = _disk_name(folder, block_devices)
    return [
        _processor(psutil.Process()),
        _CoreWait(),
        _memory,
        lambda: {"disk_free": float(psutil.disk_usage(os.fspath(folder)).free)},
        *([] if disk is None else [CounterRates(lambda: _disk_bytes(disk))]),
        CounterRates(_network_bytes),
    ]


def _processor(process: psutil.Process) -> Gauges:
    process.cpu_percent()  # each call is about the time since the one before
    psutil.cpu_percent()
    return lambda: {"cpu_percent": process.cpu_percent(), "host_cpu_percent": psutil.cpu_percent()}


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {
        "host_memory_used": float(memory.total - memory.available),
        "host_memory_free": float(tightest_limit().free),
        "host_swap_used": float(psutil.swap_memory().used),
    }


def _disk_name(folder: Path, block_devices: Path) -> str | None:
    """Return the name of the disk or partition of a folder's file system; None if it has none of its own."""
    try:
        number = os.stat(folder).st_dev
        name = (block_devices / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True).name
        return name if _disk_bytes(name) else None
    except (OSError, RuntimeError):
        return None


def _disk_bytes(disk: str) -> dict[str, float]:
    counters = psutil.disk_io_counters(perdisk=True)
    if not counters or disk not in counters:
        return {}
    return {"disk_read": counters[disk].read_bytes, "disk_write": counters[disk].write_bytes}


def _network_bytes() -> dict[str, float]:
    interfaces = {name: io for name, io in psutil.net_io_counters(pernic=True).items() if name != "lo"}
    return {
        "network_sent": sum(io.bytes_sent for io in interfaces.values()),
        "network_received": sum(io.bytes_recv for io in interfaces.values()),
    }


class _CoreWait:
    def __init__(self) -> None:
        self._before = (time.monotonic(), waited_for_core())

    def __call__(self) -> dict[str, float]:
        (then, before), (at, waited) = self._before, (time.monotonic(), waited_for_core())
        self._before = at, waited
        if before is None or waited is None or at <= then:
            return {}
        return {"core_wait_percent": min(100.0, 100 * (waited - before) / (at - then))}


class CounterRates:
    """CounterRates a second of counters since the last call, named NAME_rate; nothing on the first call."""

    def __init__(self, counters: Callable[[], dict[str, float]], now: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._now = now
        self._before: dict[str, float] = {}
        self._since = 0.0

    def __call__(self) -> dict[str, float]:
        values, at = self._counters(), self._now()
        before, seconds = self._before, at - self._since
        self._before, self._since = values, at
        if seconds <= 0:
            return {}
        # A counter that became smaller was reset: its interface or disk is another one now.
        return {
            f"{name}_rate": max(0.0, value - before[name]) / seconds for name, value in values.items() if name in before
        }
