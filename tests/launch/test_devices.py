from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.failures import fails, gives

from lockstep.config.loading import load
from lockstep.config.schema import Launch
from lockstep.core.errors import ConfigError
from lockstep.core.processes import in_fork, in_forks, may_fork, state
from lockstep.distributed import accelerators
from lockstep.distributed.accelerators import choose_backend, choose_device, visible_devices
from lockstep.distributed.process_group import joined
from lockstep.launch import devices
from lockstep.simulation.device import register
from lockstep.simulation.execution import simulated_execution
from lockstep.simulation.groups import simulated_groups


@pytest.mark.parametrize(
    ("section", "gpus", "ranks"),
    [({}, 0, 1), ({}, 4, 4), ({"ranks": 3}, 4, 3), ({"device": "cpu"}, 4, 1), ({"ranks": 3, "device": "cpu"}, 4, 3)],
)
def test_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, object], gpus: int, ranks: int
) -> None:
    launch = Launch.model_validate(section)
    if launch.device != "cpu":
        monkeypatch.setattr(devices, "count_accelerators", lambda launch: ("cuda", gpus))
    assert devices.choose_ranks(launch) == ranks


def test_fewer_accelerators_than_ranks_are_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, ranks found out when they met, and `use gloo` was the remedy under nccl, which refuses them too."""
    monkeypatch.setattr(devices, "count_accelerators", lambda launch: ("xpu", 2))
    assert devices.check_ranks(2, Launch()) is None
    with fails(ConfigError, 4, "2 xpu devices", "launch.device", key="launch.ranks"):
        devices.check_ranks(4, Launch())


def test_too_many_ranks_for_the_cores_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_cores", lambda: 2)
    assert devices.check_ranks(2, Launch()) is None
    assert gives(devices.check_ranks(3, Launch()) or "", "3 ranks", "2 cores")


def test_cores_are_shared_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_cores", lambda: 16)
    assert [devices.threads_per_rank(ranks) for ranks in (1, 2, 3, 16, 64)] == [16, 8, 5, 1, 1]


def test_counting_accelerators_starts_no_driver_in_this_process() -> None:
    before = torch.cuda.is_initialized()
    assert devices.count_accelerators(Launch(device="cuda")) == ("cuda", torch.cuda.device_count())
    assert torch.cuda.is_initialized() == before


def test_a_copy_of_the_process_returns_what_it_counts() -> None:
    assert in_fork(os.getpid) != os.getpid()


class _Accelerator(SimpleNamespace):
    """torch's module of a device that this machine doesn't have."""

    def __init__(self, count: int, **members: Any) -> None:
        used = dict.fromkeys(accelerators._USED, lambda *unused: None)
        super().__init__(**{**used, "device_count": lambda: count, "set_device": self._set, **members})
        self.current: Any = None

    def _set(self, device: torch.device) -> None:
        self.current = device


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> _Accelerator:
    """Two Intel GPUs."""
    module = _Accelerator(2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"xpu": module}[torch.device(device).type])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    return module


def test_auto_takes_whatever_accelerator_torch_finds(xpu: _Accelerator) -> None:
    """Before, it asked for CUDA alone, and any other accelerator idled while the CPU computed."""
    assert visible_devices("auto") == ("xpu", 2)
    assert choose_device("auto", 1) == xpu.current == torch.device("xpu", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")
    assert devices.count_accelerators(Launch()) == ("xpu", 2)


def test_a_rank_that_sees_one_device_takes_it_whatever_its_local_rank(xpu: _Accelerator) -> None:
    xpu.device_count = lambda: 1
    assert choose_device("auto", 3) == torch.device("xpu", 0)


def test_a_plugin_without_a_device_does_not_hide_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names the device of a registered plugin as its accelerator, whether there is one or not."""
    modules = {"simulated": register(), "cuda": _Accelerator(8)}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[torch.device(device).type])
    assert visible_devices("auto") == ("cuda", 8)


def test_the_backend_is_the_one_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    assert choose_backend("auto", torch.device("cuda", 1)) == "nccl"
    assert choose_backend("auto", torch.device("xpu", 1)) == "xccl"
    assert choose_backend("gloo", torch.device("cuda", 1)) == "gloo"


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"device": "cuda"}, "launch.device: cuda was asked for, and torch finds no such device on this machine; "),
        ({"device": "npu"}, "launch.device: npu was asked for, and torch finds no such device on this machine; "),
        ({"backend": "xccl"}, "launch.backend: xccl isn't part of this build of torch; gloo works"),
    ],
)
def test_what_this_machine_lacks_is_one_sentence(launch: dict[str, str], message: str) -> None:
    if launch.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("it has one")
    with pytest.raises(ConfigError) as caught, joined(Launch.model_validate({"device": "cpu", **launch}), grouped=True):
        pass
    assert str(caught.value).startswith(message)


def test_a_backend_of_other_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    for requested, device, message in (
        ("nccl", "cpu", "nccl takes no tensors of cpu, where this rank computes; gloo works"),
        ("auto", "mps", "gloo takes no tensors of mps, where this rank computes; launch.device: cpu works"),
        ("auto", "mtia", "torch has no backend for mtia; name its plugin's, or write launch.device: cpu"),
    ):
        with pytest.raises(ConfigError) as caught:
            choose_backend(requested, torch.device(device))
        assert str(caught.value) == f"launch.backend: {message}"


def test_a_device_that_torch_supports_in_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    with fails(ConfigError, "torch.mps", "Stream", key="launch.device"):
        choose_device("mps", 0)


@pytest.mark.parametrize(
    ("key", "word", "message"),
    [
        ("device", "cudda", "'cudda' is not one of auto, cpu, cuda, xpu, mps, mtia, npu, hpu, mlu, musa; did you mean"),
        ("device", "cuda:1", "did you mean cuda?"),
        ("device", "meta", "'meta' is not one of auto, "),
        ("backend", "ncll", "'ncll' is not one of auto, nccl, gloo, xccl, hccl, cncl, mccl, ucc; did you mean nccl?"),
    ],
)
def test_a_misspelled_word_gets_the_nearest(tmp_path: Path, key: str, word: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f'launch: {{{key}: "{word}"}}\n')
    with pytest.raises(ConfigError) as caught:
        load([str(file)])
    assert f"run.yaml:1:{len(key) + 12}: launch.{key}: " in str(caught.value)
    assert message in str(caught.value)


def test_a_device_that_a_plugin_registered_runs_under_its_own_backend() -> None:
    """The simulated device is one: a Python backend that `launch.device` doesn't list."""
    register()
    launch = Launch(device="simulated")
    with simulated_groups(0, 1), simulated_execution(), joined(launch, grouped=True) as world:
        assert (world.device, world.backend) == (torch.device("simulated", 0), "simulated")
        assert choose_backend("auto", world.device) == "simulated"
        assert devices.count_accelerators(Launch()) == ("simulated", 1)
        assert not may_fork(), "the device is in use"
        assert torch.ones(2, device=world.device).sum().item() == 2


def test_copies_of_the_process_return_results_in_order() -> None:
    def slow(number: int) -> tuple[int, int]:
        time.sleep(0.1 if number == 0 else 0)
        return number, os.getpid()

    results = list(in_forks((partial(slow, number) for number in range(5)), at_once=3))
    assert [number for number, _ in results] == [0, 1, 2, 3, 4]
    assert len({process for _, process in results} - {os.getpid()}) == 5


def test_copies_whose_results_nobody_waits_for_are_ended(tmp_path: Path) -> None:
    def endless() -> int:
        (tmp_path / "process").write_text(str(os.getpid()))
        time.sleep(600)
        return 0

    results = in_forks([partial(awaited, tmp_path / "process"), endless], at_once=2)
    process = int(next(results))
    assert state(process)
    del results
    assert not state(process)


def awaited(file: Path) -> str:
    while not file.exists() or not file.read_text():
        time.sleep(0.01)
    return file.read_text()


def test_what_fails_in_a_copy_of_this_process_fails_here() -> None:
    assert in_fork(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_fork(lambda: 1 // 0)
