"""Gauges of the host: this machine's, and disks and counters that a test makes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from kit.worlds import in_process

from lockstep.core.phase_clock import PhaseClock
from lockstep.core.processes import waited_for_core
from lockstep.distributed.notice_board import NoticeBoard
from lockstep.monitor import rank_meters as meter_files
from lockstep.monitor.host_gauges import CounterRates, host_gauges
from lockstep.monitor.rank_meters import MeterFiles, RankMeters


def read(folder: Path, times: int = 2) -> dict[str, float]:
    gauges = host_gauges(folder)
    values: dict[str, float] = {}
    for _ in range(times):
        values = {name: value for gauge in gauges for name, value in gauge().items()}
        time.sleep(0.01)
    return values


def test_this_machine_has_its_gauges(tmp_path: Path) -> None:
    values = read(tmp_path)
    rates = {"network_sent_rate", "network_received_rate"}
    if psutil.disk_io_counters() is not None:
        rates |= {"disk_read_rate", "disk_write_rate"}
    memory = {"host_memory_used", "host_memory_free", "host_swap_used"}
    assert set(values) == {"cpu_percent", "core_wait_percent", "host_cpu_percent", "disk_free", *memory, *rates}
    assert 0 <= values["host_cpu_percent"] <= 100
    assert values["disk_free"] == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.1)
    assert values["host_memory_used"] < psutil.virtual_memory().total


def test_a_thread_that_shares_its_core_waits_for_half_of_its_time(tmp_path: Path) -> None:
    assert in_process(share_a_core, tmp_path) > 20


def share_a_core(folder: Path) -> float:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    gauges = host_gauges(folder)
    other = os.fork()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    if other == 0:
        os._exit(0)
    os.waitpid(other, 0)
    return next(values["core_wait_percent"] for gauge in gauges if "core_wait_percent" in (values := gauge()))


def test_a_kernel_that_does_not_count_has_no_wait(tmp_path: Path) -> None:
    assert waited_for_core(tmp_path) is None


def test_a_process_that_computes_shows(tmp_path: Path) -> None:
    gauges = host_gauges(tmp_path)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert gauges[0]()["cpu_percent"] > 10


def test_rates_are_a_second_and_a_counter_that_is_reset_is_not_negative() -> None:
    values = iter([{"sent": 0.0}, {"sent": 100.0, "received": 9.0}, {"sent": 20.0, "received": 19.0}, {}])
    now = iter([0.0, 10.0, 20.0, 20.0])
    rates = CounterRates(lambda: next(values), lambda: next(now))
    assert [rates() for _ in range(4)] == [{}, {"sent_rate": 10.0}, {"sent_rate": 0.0, "received_rate": 1.0}, {}]


def test_loopback_is_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = SimpleNamespace(bytes_sent=0, bytes_recv=0)
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: {"lo": SimpleNamespace(), "eth0": io})
    network = host_gauges(tmp_path)[-1]
    network()
    io.bytes_sent = 9_000_000
    assert network()["network_sent_rate"] > 1e6


def test_a_gauge_without_an_answer_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meter_files, "_PATIENCE_S", 0.05)
    released, board = threading.Event(), NoticeBoard(None, 0, 1)

    def hanging() -> dict[str, float]:
        released.wait(30)
        return {}

    files = MeterFiles(tmp_path, board, interval=0.0, ranks=1)
    thread = RankMeters(PhaseClock(), board, 0, lambda: 1, [hanging], files, seconds=0.01)
    thread.start()
    began = time.monotonic()
    thread.finish()
    assert time.monotonic() - began < 5
    assert "the run ends without the last ones" in caplog.text
    released.set()
