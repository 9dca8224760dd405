"""Gauges of the host and of this rank's process, read in the meters' thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from lockstep.core.control_groups import tightest_limit
from lockstep.core.processes import waited_for_core

Gauges = Callable[[], Mapping[str, float]]


def host_gauges(folder: Path) -> list[Gauges]:
    """Return the gauges of the host, in groups that fail independently.

    cpu_percent                            of this process; 100 is one core
    core_wait_percent                      of its time, the main thread waits for a core (Linux)
    host_cpu_percent                       of all cores together, 0 to 100
    host_memory_used, host_memory_free     bytes; free within the control group's limit
    host_swap_used                         bytes
    disk_free                              bytes of the run's file system
    disk_read_rate, disk_write_rate        bytes a second of all disks
    network_sent_rate, network_received_rate   bytes a second of all interfaces but loopback
    """
    return [
        _processor(psutil.Process()),
        _core_wait(),
        _memory,
        lambda: {"disk_free": float(psutil.disk_usage(os.fspath(folder)).free)},
        CounterRates(_disk_bytes),
        CounterRates(_network_bytes),
    ]


def _processor(process: psutil.Process) -> Gauges:
    process.cpu_percent()  # as above
    psutil.cpu_percent()
    return lambda: {"cpu_percent": process.cpu_percent(), "host_cpu_percent": psutil.cpu_percent()}


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {
        "host_memory_used": float(memory.total - memory.available),
        "host_memory_free": float(tightest_limit().free),
        "host_swap_used": float(psutil.swap_memory().used),
    }


def _disk_bytes() -> dict[str, float]:
    counters = psutil.disk_io_counters()
    return {"disk_read": counters.read_bytes, "disk_write": counters.write_bytes} if counters is not None else {}


def _network_bytes() -> dict[str, float]:
    interfaces = {name: io for name, io in psutil.net_io_counters(pernic=True).items() if name != "lo"}
    return {
        "network_sent": sum(io.bytes_sent for io in interfaces.values()),
        "network_received": sum(io.bytes_recv for io in interfaces.values()),
    }


def _core_wait() -> Gauges:
    rates = CounterRates(lambda: {} if (waited := waited_for_core()) is None else {"core_wait": waited})
    rates()  # each call is about the time since the one before
    return lambda: {f"{name[:-5]}_percent": min(100.0, 100 * rate) for name, rate in rates().items()}


class CounterRates:
    """Rates a second of counters since the last call, called NAME_rate; nothing on the first call."""

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
