"""NVIDIA GPUs by a stand-in of their driver's module: values, what is missing, failures, what the console states."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch
from kit.nvml import ANSWERS, OF_WHOLE_BOARDS, Board, Driver, error
from kit.reports import FACTS

from lockstep.core.phase_clock import Phase, UpdateTimes
from lockstep.monitor import nvidia
from lockstep.monitor.console import Console, GpuHealth
from lockstep.monitor.nvidia import DeviceGauges, NvmlMissing, gpu_gauges, gpu_of, nvml_module
from lockstep.monitor.rank_meters import MeterReport, RankInterval, RankNotice


def report(*gauges: dict[str, float], hosts: str = "ab") -> MeterReport:
    """Meters of ranks that have these gauges, on two hosts."""
    notices = [
        RankNotice(rank, hosts[rank % len(hosts)], 1, 0.0, 5, Phase.FORWARD, 0.0, UpdateTimes(), values)
        for rank, values in enumerate(gauges)
    ]
    return MeterReport(20, 10.0, tuple(RankInterval.between(None, notice) for notice in notices))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(Board("GPU-1"))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(nvidia, "uuid_of", lambda device: "1")
    return driver


def test_the_stand_in_and_the_constants_are_those_of_the_real_module() -> None:
    assert [name for name in (*ANSWERS, *OF_WHOLE_BOARDS) if not callable(getattr(pynvml, name))] == []
    known = {"GpuIdle": 0x1, "ApplicationsClocksSetting": 0x2, "DisplayClockSetting": 0x100}
    every = {
        getattr(pynvml, name)
        for name in dir(pynvml)
        if name.startswith("nvmlClocksThrottleReason") and not name.endswith(("All", "None"))
    }
    assert every == {*nvidia.THROTTLE_REASONS, *known.values()}, "a new reason needs words"
    assert pynvml.nvmlEventTypeXidCriticalError == nvidia._XID_CRITICAL_ERROR
    assert (nvidia._CLOCK_SM, nvidia._CLOCK_MEMORY) == (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    assert (*kinds, pynvml.NVML_VOLATILE_ECC) == (nvidia._CORRECTED, nvidia._UNCORRECTED, nvidia._VOLATILE)
    for kind in (*nvidia._LOST, *nvidia._DRIVER_GONE):
        assert issubclass(getattr(pynvml, kind), pynvml.NVMLError)


def test_a_gpu_has_its_values_in_units_that_people_read() -> None:
    board = Board("GPU-1", reasons=0x1 | 0x2)
    gpu = gpu_of(Driver(board), "1")
    assert gpu.read() == {
        "gpu_utilization": 97.0,
        "gpu_memory_utilization": 40.0,
        "gpu_memory_used": 60 * 2.0**30,
        "gpu_memory_total": 80 * 2.0**30,
        "gpu_temperature": 71.0,
        "gpu_power": 612.5,
        "gpu_power_limit": 700.0,
        "gpu_clock": 1755.0,
        "gpu_clock_limit": 1980.0,
        "gpu_memory_clock": 2619.0,
        "gpu_throttled": 0.0,
        "gpu_ecc_corrected": 0.0,
        "gpu_ecc_uncorrected": 0.0,
        "gpu_xid_errors": 0.0,
    }
    board.reasons = 0x20 | 0x40
    board.xids.extend([13, 79])
    values = gpu.read()
    assert (values["gpu_throttled"], values["gpu_throttled_thermal"], values["gpu_throttled_hardware_thermal"]) == (
        1.0,
        1.0,
        1.0,
    )
    assert (values["gpu_xid_errors"], values["gpu_last_xid"]) == (2.0, 79.0)
    board.reasons = 0
    values = gpu.read()
    assert (values["gpu_throttled"], values["gpu_throttled_thermal"], values["gpu_xid_errors"]) == (0.0, 0.0, 2.0)


def test_a_mig_instance_has_its_memory_and_the_rest_of_its_gpu() -> None:
    parent = Board("GPU-1", temperature=66, xids=Board("x").xids)
    instance = Board("MIG-7", used=5 << 30, parent=parent)
    driver = Driver(parent, instance)
    values = gpu_of(driver, "7").read()
    assert "gpu_utilization" not in values
    assert (values["gpu_memory_used"], values["gpu_temperature"]) == (5 * 2.0**30, 66.0)
    assert driver.registered == [parent]


@pytest.mark.parametrize("kind", ["NO_PERMISSION", "NOT_SUPPORTED"])
def test_what_a_user_or_gpu_may_not_read_is_left_out(kind: str) -> None:
    refused = ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents", "nvmlDeviceGetPowerUsage")
    driver = Driver(Board("GPU-1", failures=dict.fromkeys(refused, error(kind))))
    gpu = gpu_of(driver, "1")
    values = gpu.read()
    assert not [name for name in values if "ecc" in name or "xid" in name or name == "gpu_power"]
    assert values["gpu_temperature"] == 71.0


def test_a_value_that_fails_for_once_is_read_again() -> None:
    board = Board("GPU-1", failures={"nvmlDeviceGetTemperature": error("UNKNOWN")})
    gpu = gpu_of(Driver(board), "1")
    assert "gpu_temperature" not in gpu.read()
    board.failures.clear()
    assert gpu.read()["gpu_temperature"] == 71.0


@pytest.mark.parametrize("kind", ["GPU_IS_LOST", "RESET_REQUIRED"])
def test_a_lost_gpu_is_one_value(kind: str) -> None:
    driver = Driver(Board("GPU-1"))
    gpu = gpu_of(driver, "1")
    driver.fails = error(kind)
    assert gpu.read() == {"gpu_lost": 1.0}


@pytest.mark.parametrize(
    ("init", "sentence"),
    [("LIBRARY_NOT_FOUND", "can't be asked"), ("DRIVER_NOT_LOADED", "can't be asked"), ("NO_PERMISSION", "asked")],
)
def test_a_machine_without_a_driver_is_reported_once(
    init: str, sentence: str, installed: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    installed.init = error(init)
    gauges = DeviceGauges(torch.device("cuda", 0))
    assert gauges() == gauges() == {}
    assert caplog.text.count(sentence) == 1


def test_a_driver_that_was_unloaded_is_reported_once(installed: Driver, caplog: pytest.LogCaptureFixture) -> None:
    gauges = DeviceGauges(torch.device("cuda", 0))
    assert gauges()["gpu_temperature"] == 71.0
    installed.fails = error("DRIVER_NOT_LOADED")
    assert gauges() == gauges() == {}
    assert caplog.text.count("doesn't answer any longer") == 1


def test_without_the_package_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlMissing, match=r"pip install 'lockstep-torch\[nvidia\]'"):
        nvml_module()


def test_a_gpu_that_the_driver_does_not_have_is_named() -> None:
    with pytest.raises(NvmlMissing, match="doesn't give access to GPU 9"):
        gpu_of(Driver(Board("GPU-1")), "9")


def test_only_nvidia_gpus_have_these_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [type(gauge) for gauge in gpu_gauges(cuda)] == [DeviceGauges]
    assert gpu_gauges(torch.device("cpu")) == []
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls its devices cuda, too
    assert gpu_gauges(cuda) == []


def test_torch_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="6d4d"))
    assert nvidia.uuid_of(torch.device("cuda", 0)) == "6d4d"


def test_the_console_states_each_fault_once_with_rank_and_host() -> None:
    stream = io.StringIO()
    console = Console(10, stream=stream)
    console.start(FACTS)
    well = {"gpu_throttled": 0.0, "gpu_xid_errors": 0.0, "gpu_ecc_uncorrected": 0.0, "gpu_ecc_corrected": 3.0}
    hot = {**well, "gpu_throttled": 1.0, "gpu_throttled_thermal": 1.0}
    ill = {**well, "gpu_xid_errors": 1.0, "gpu_last_xid": 79.0, "gpu_ecc_corrected": 4.0}
    console.measured(report(well, well, well))
    console.measured(report(hot, ill, hot))
    console.measured(report(hot, ill, hot))
    console.measured(report(well, {"gpu_lost": 1.0}, well))
    console.finish(None)  # and its thread has written
    assert [line for line in stream.getvalue().splitlines() if "GPU" in line] == [
        "step 20: GPU of ranks 0 and 2 on a: throttled by its temperature limit",
        "step 20: GPU of rank 1 on b: Xid error 79 (https://docs.nvidia.com/deploy/xid-errors), number 1 of this run",
        "step 20: GPU of rank 1 on b: no longer answers its driver; check it with nvidia-smi and restart its host",
    ]


def test_many_gpus_are_one_line_and_a_second_xid_is_another() -> None:
    health = GpuHealth()
    (line,) = health.lines(report(*[{"gpu_throttled_power_cap": 1.0}] * 10, hosts="abc"))
    assert "on a, b and 1 more: throttled by its power limit" in line
    assert health.lines(report({"gpu_xid_errors": 1.0, "gpu_last_xid": 31.0}))
    assert not health.lines(report({"gpu_xid_errors": 1.0, "gpu_last_xid": 31.0}))
    assert "Xid error 31" in health.lines(report({"gpu_xid_errors": 2.0, "gpu_last_xid": 31.0}))[0]
    assert "Xid error 500" in health.lines(report({"gpu_xid_errors": 3.0, "gpu_last_xid": 500.0}))[0]
    assert "uncorrected ECC errors" in health.lines(report({"gpu_ecc_uncorrected": 2.0}))[0]
