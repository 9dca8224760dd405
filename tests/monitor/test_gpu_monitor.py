"""The GPU monitor over a stand-in of NVML: history, summary, visible GPUs, machines without any."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from kit.nvml import Board, Driver, error

from lockstep.loops import GPUMonitor


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(Board("GPU-1", temperature=60), Board("GPU-2", temperature=80))
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_summary_is_over_the_history(driver: Driver) -> None:
    with GPUMonitor(seconds=0.005) as gpus:
        wait_for(lambda: bool(gpus.history()))
        driver.boards[0].temperature = 90
        wait_for(lambda: gpus.summary()[0]["gpu_temperature"].max == 90)
    low, mean, high = gpus.summary()[0]["gpu_temperature"]
    assert (low, high) == (60, 90)
    assert 60 < mean < 90
    assert gpus.summary()[1]["gpu_power"] == (612.5, 612.5, 612.5)
    moments = [sample.time for sample in gpus.history()]
    assert moments == sorted(moments)
    assert (
        str(gpus)
        .splitlines()[1]
        .startswith("GPU 1, NVIDIA H100 80GB HBM3: utilization 97 % (max 97), temperature 80 C")
    )
    length = len(gpus.history())
    time.sleep(0.02)
    assert len(gpus.history()) == length  # its thread has ended


def test_the_history_is_bounded(driver: Driver) -> None:
    with GPUMonitor(seconds=0.001, kept=3) as gpus:
        wait_for(lambda: driver.calls.count("nvmlDeviceGetTemperature") > 20)
    assert len(gpus.history()) == 2 * 3


@pytest.mark.parametrize(("visible", "temperatures"), [("1", [80]), ("GPU-2,0", [80, 60]), ("", []), ("0,-1,1", [60])])
def test_gpus_are_those_that_cuda_shows(
    visible: str, temperatures: list[float], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with GPUMonitor(seconds=1) as gpus:
        wait_for(lambda: len(gpus.history()) == len(temperatures))
    assert [ranges["gpu_temperature"].max for ranges in gpus.summary().values()] == temperatures
    assert ("sees no NVIDIA GPU" in str(gpus)) == (not temperatures)


def test_a_machine_without_gpus_gets_an_answer(driver: Driver) -> None:
    driver.init = error("LIBRARY_NOT_FOUND")
    with GPUMonitor() as gpus:
        pass
    assert (gpus.history(), gpus.summary()) == ([], {})
    assert "no GPU is read: NVIDIA's driver can't be asked: NVML Shared Library Not Found" in str(gpus)


def test_a_driver_that_is_unloaded_ends_the_history(driver: Driver) -> None:
    with GPUMonitor(seconds=0.005) as gpus:
        wait_for(lambda: bool(gpus.history()))
        driver.fails = error("DRIVER_NOT_LOADED")
        wait_for(lambda: bool(gpus.reason))
    assert "doesn't answer any longer" in gpus.reason
    assert gpus.summary()[0]


def test_mistakes_are_named() -> None:
    assert "was not started" in str(GPUMonitor())
    with pytest.raises(ValueError, match="every 0 s"):
        GPUMonitor(seconds=0)
