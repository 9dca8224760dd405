"""Each planted fault is named by its check, with a remedy; without the fault the same check has nothing to report."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.failures import gives
from kit.planted import install

from lockstep.core import hub
from lockstep.core.errors import RunFailed
from lockstep.doctor import software, system
from lockstep.doctor.checks import CHECKS, Check, examine
from lockstep.doctor.findings import (
    Finding,
    FindingState,
    MachineView,
    as_json,
    describe,
    exit_code,
    ok,
    warning,
    wrong,
)


def _machine(environ: Mapping[str, str] | None = None, **parts: Any) -> MachineView:
    return MachineView(environ={"PATH": os.environ["PATH"], **(environ or {})}, **parts)


def _bad(findings: Iterable[Finding]) -> list[Finding]:
    bad = [finding for finding in findings if finding.state in (FindingState.WRONG, FindingState.WARNING)]
    assert all(finding.remedy for finding in bad)
    return bad


def _wrong(findings: Iterable[Finding]) -> str:
    """The only finding, which is wrong, as text."""
    (finding,) = _bad(findings)
    assert finding.state is FindingState.WRONG, finding
    return f"{finding.seen} -> {finding.remedy}"


def _warning(findings: Iterable[Finding]) -> str:
    (finding,) = _bad(findings)
    assert finding.state is FindingState.WARNING, finding
    return f"{finding.seen} -> {finding.remedy}"


# --- packages ---------------------------------------------------------------------------------------------------------


def test_a_torchvision_for_another_torch_is_named(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.21.0", "numpy", "torch (==2.6.0)", 'pillow; extra == "more"')
    text = _wrong(software.packages_fit(_machine(search_path=[str(tmp_path)])))
    assert gives(text, "torchvision 0.21.0", "torch==2.6.0", "2.13.0+cpu")


def test_packages_that_fit_are_fine(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0+cpu", "torch (==2.13.0)", 'torch==1.0; python_version < "3"')
    machine = _machine(search_path=[str(tmp_path)])
    assert not _bad(software.packages_fit(machine))


def test_a_torchvision_built_for_another_cuda_is_named(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0+cu130", "torch==2.13.0")
    text = _wrong(software.packages_fit(_machine(search_path=[str(tmp_path)])))
    assert gives(text, "torchvision 0.28.0+cu130", "2.13.0+cpu")


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert gives(_warning(software.compiler(_machine(environ))), "PATH")
    assert gives(_warning(software.compiler(_machine({"CXX": "g++-99"}))), "CXX=g++-99")
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    assert not [finding for finding in software.compiler(_machine(environ)) if "no C++" in finding.seen]


# --- torch and accelerators -------------------------------------------------------------------------------------------


def test_a_torch_that_cant_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch isn't installed" in _wrong(software.torch_imports(_machine()))


def _with_gpus(root: Path, count: int, driver: str = "580.65.06") -> Path:
    (root / "dev").mkdir(parents=True)
    for number in range(count):
        (root / "dev" / f"nvidia{number}").write_text("")
    (root / "proc/driver/nvidia").mkdir(parents=True)
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sun Jul 27 07:04:28 UTC 2025\n"
    (root / "proc/driver/nvidia/version").write_text(text if driver else "")
    return root


def test_gpus_that_torch_does_not_find_are_named(tmp_path: Path) -> None:
    machine = _machine(root=_with_gpus(tmp_path, 2))
    assert gives(_warning(software.accelerators(machine)), "2 NVIDIA GPUs", "CPU")
    assert not _bad(software.accelerators(_machine({"CUDA_VISIBLE_DEVICES": ""}, root=machine.root)))
    assert not _bad(software.accelerators(_machine(root=tmp_path / "none")))


@pytest.mark.parametrize(
    ("driver", "text"),
    [("470.82.01", "driver 470.82.01 is too old for CUDA 12.8"), ("", "no driver is loaded"), ("580.65.06", "Xid")],
)
def test_why_gpus_are_not_usable(driver: str, text: str, tmp_path: Path) -> None:
    machine = _machine(root=_with_gpus(tmp_path, 1, driver))
    assert text in _wrong([software.not_usable(machine, 1, "12.8")])


def test_gpus_without_a_direct_link_are_named(tmp_path: Path) -> None:
    def torch(linked: bool) -> Any:
        nccl = SimpleNamespace(version=lambda: (2, 28, 9))
        cuda = SimpleNamespace(
            can_device_access_peer=lambda first, second: linked or {first, second} != {0, 1}, nccl=nccl
        )
        distributed = SimpleNamespace(is_nccl_available=lambda: linked)
        return SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda, distributed=distributed)

    machine = _machine(root=_with_gpus(tmp_path, 3))
    assert not _bad(software.nvidia(machine, torch(True), 3))
    texts = [finding.seen for finding in _bad(software.nvidia(machine, torch(False), 3))]
    assert "no NCCL" in texts[0]
    assert gives(texts[1], "2 of 6", "0 and 1")


# --- disks, limits, the clock -----------------------------------------------------------------------------------------


def _status(free: int, total: int, inodes: int = 10**6) -> Any:
    return SimpleNamespace(f_bavail=free, f_blocks=total, f_frsize=1, f_files=10**7, f_favail=inodes)


GIB = 1 << 30


def test_full_disks_are_named(tmp_path: Path) -> None:
    def machine(*status: int) -> MachineView:
        return _machine(folder=tmp_path / "runs", cache=tmp_path, statvfs=lambda _: _status(*status))

    for check in (system.run_disk, system.cache_disk):
        assert "512 MiB of 100 GiB free" in _wrong(check(machine(GIB // 2, 100 * GIB)))
        assert "10 inodes left" in _wrong(check(machine(50 * GIB, 100 * GIB, 10)))
        assert "3.00 GiB of 100 GiB" in _warning(check(machine(3 * GIB, 100 * GIB)))
        assert not _bad(check(machine(50 * GIB, 100 * GIB)))


def test_a_full_shared_memory_is_named(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)

    def machine(*status: int) -> MachineView:
        return _machine(root=tmp_path, statvfs=lambda _: _status(*status))

    text = _wrong(system.shared_memory(machine(1 << 20, 64 << 20)))
    assert "1.00 MiB of 64.0 MiB free" in text
    assert "--shm-size" in text
    assert "64.0 MiB" in _warning(system.shared_memory(machine(64 << 20, 64 << 20)))
    assert not _bad(system.shared_memory(machine(8 * GIB, 8 * GIB)))

    def fails(path: Path) -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    assert "mount -t tmpfs" in _wrong(system.shared_memory(_machine(root=tmp_path, statvfs=fails)))


def test_a_low_limit_of_open_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, is_low in ((1024, True), (65536, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(system.resource, "getrlimit", lambda which, hard=hard: (256, hard))
        assert bool(_bad(system.open_files(_machine()))) == is_low


def test_a_clock_that_differs_is_named(tmp_path: Path) -> None:
    def machine(skew: float) -> MachineView:
        return _machine(folder=tmp_path, file_time=lambda _: time.time() + skew)

    assert gives(_wrong(system.clock(machine(40))), "40.0 s")
    assert gives(_wrong(system.clock(machine(-40))), "40.0 s")
    assert gives(_warning(system.clock(machine(3))), "3.0 s")
    assert not _bad(system.clock(_machine(folder=tmp_path)))  # the disk's own time
    assert os.listdir(tmp_path) == []


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_named_with_its_process(taken: int) -> None:
    text = _wrong(system.port(_machine(port=taken)))
    assert gives(text, taken, os.getpid())
    assert "launch.port" in text
    assert "MASTER_PORT" in _wrong(system.port(_machine({"MASTER_PORT": str(taken)})))
    elsewhere = {"MASTER_PORT": str(taken), "MASTER_ADDR": "192.0.2.77"}
    assert not [finding for finding in system.port(_machine(elsewhere)) if str(taken) in finding.seen]


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_wrong_interface_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "interfaces", lambda: {"ethA": "10.1.0.5", "ethB": "10.2.0.5"})

    def findings(value: str) -> Iterable[Finding]:
        return system.network_interfaces(_machine({variable: value}))

    assert gives(_wrong(findings("eno9")), "ethA, ethB")
    assert not _bad(findings("ethA"))


def test_ncclls_forms_of_interface_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "interfaces", lambda: {"eth0": "10.1.0.5"})
    for value in ("eth", "=eth0", "^docker", "ib,eth"):
        assert not _bad(system.network_interfaces(_machine({"NCCL_SOCKET_IFNAME": value})))
    assert _bad(system.network_interfaces(_machine({"NCCL_SOCKET_IFNAME": "=eth"})))
    assert _bad(system.network_interfaces(_machine({"GLOO_SOCKET_IFNAME": "eth"})))


def test_this_machines_interfaces_are_read() -> None:
    assert system.interfaces()["lo"] == "127.0.0.1"


def test_the_hub_is_asked_unless_it_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = []
    monkeypatch.setattr(hub, "responds", lambda endpoint: bool(endpoints.append(endpoint)))
    assert not _bad(system.hugging_face_hub(_machine({"HF_HUB_OFFLINE": "1"})))
    assert endpoints == []
    assert "http://mirror doesn't answer" in _warning(
        system.hugging_face_hub(_machine({"HF_ENDPOINT": "http://mirror"}))
    )
    monkeypatch.setattr(hub, "responds", lambda endpoint: True)
    assert not _bad(system.hugging_face_hub(_machine()))


# --- variables --------------------------------------------------------------------------------------------------------

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "2"}, "RANK is 2, but"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_contradictory_rank_variables_are_named(change: dict[str, str], text: str) -> None:
    assert text in _wrong(system.rank_variables(_machine(RANK | change)))


def test_a_missing_rank_variable_is_named() -> None:
    environ = {name: value for name, value in RANK.items() if name != "MASTER_ADDR"}
    assert gives(_wrong(system.rank_variables(_machine(environ))), "MASTER_ADDR")


def test_left_over_rank_variables_are_a_warning() -> None:
    assert "rank 0 of 2" in _warning(system.rank_variables(_machine(RANK)))
    assert not _bad(system.rank_variables(_machine()))


def test_wrong_numbers_of_threads_are_named() -> None:
    many = {"OMP_NUM_THREADS": "64", "LOCAL_WORLD_SIZE": "64"}
    assert "4096 threads" in _warning(system.threads(_machine(many)))
    assert not _bad(system.threads(_machine({"OMP_NUM_THREADS": "1"})))


BROKEN = [{name: value} for name, value, _, _ in system.SETTINGS]


@pytest.mark.parametrize("environ", BROKEN, ids=lambda environ: "+".join(environ))
def test_each_rule_of_variables_names_them(environ: dict[str, str]) -> None:
    (finding,) = _bad(system.contradictions(_machine(environ)))
    assert all(f"{name}={value}" in finding.seen for name, value in environ.items())


def test_harmless_variables_are_fine() -> None:
    environ = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    assert not _bad(system.contradictions(_machine(environ)))


# --- all together -----------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_or_raises_is_a_finding() -> None:
    forever = threading.Event()

    def hangs(machine: MachineView) -> list[Finding]:
        forever.wait()
        return []

    def breaks(machine: MachineView) -> list[Finding]:
        raise RunFailed("no idea")

    def no_disk(machine: MachineView) -> list[Finding]:
        raise OSError(errno.EIO, "Input/output error", "/data")

    rows = [Check("fine", lambda machine: [ok("yes")]), Check("hangs", hangs, 0.05), Check("no disk", no_disk)]
    findings = examine(_machine(), [*rows, Check("breaks", breaks)])
    forever.set()
    assert [(finding.name, finding.state) for finding in findings] == [
        ("fine", FindingState.OK),
        ("hangs", FindingState.WRONG),
        ("no disk", FindingState.WRONG),
        ("breaks", FindingState.WARNING),
    ]
    assert "/data: Input/output error" in findings[2].seen
    assert "RunFailed: no idea" in findings[3].seen


def test_what_is_wrong_comes_first_and_fits_80_columns() -> None:
    findings = [
        replace(ok("x" * 200), name="long"),
        replace(warning("slow " * 30, "Do this."), name="slow"),
        replace(wrong("broken", "Mend it."), name="broken"),
    ]
    text = describe(findings, 80)
    assert text.splitlines()[0] == "1 wrong, 1 warning, 1 ok"
    assert text.index("wrong: broken") < text.index("warning: slow") < text.index("ok        long")
    assert max(map(len, text.splitlines())) == 80
    assert exit_code(findings) == 3
    assert exit_code(findings[:2]) == 0
    assert as_json(findings)["findings"][2] == {
        "name": "broken",
        "state": "wrong",
        "seen": "broken",
        "remedy": "Mend it.",
    }


def test_this_machine_is_examined(tmp_path: Path) -> None:
    began = time.process_time()
    machine = _machine({"HF_HUB_OFFLINE": "1"}, folder=tmp_path, cache=tmp_path)
    findings = examine(machine)
    assert {finding.name for finding in findings} == {check.name for check in CHECKS}
    assert not [finding for finding in findings if "the check failed" in finding.seen]
    assert time.process_time() - began < 3
