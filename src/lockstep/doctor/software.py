"""Checks of Python, of packages, of a compiler, and of torch with the accelerators that it finds."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.core.distribution import DISTRIBUTION
from lockstep.core.formatting import size
from lockstep.doctor.findings import Finding, MachineView, not_here, ok, warning, wrong

_OLDEST, _NEWEST = (3, 11), (3, 13)
_OLDEST_TORCH = (2, 11)
_SLOW_IMPORT_S = 30
_PACKAGES = (
    DISTRIBUTION, "torch", "torchvision", "torchaudio", "deepspeed", "transformers", "datasets", "tokenizers",
    "accelerate", "peft", "torchao", "safetensors", "numpy", "triton",
)  # fmt: skip
_BUILT_FOR_TORCH = ("torchvision", "torchaudio")
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version --> the oldest driver for its minor versions (CUDA Toolkit Release Notes, table 2)."""


def python(machine: MachineView) -> Iterator[Finding]:
    """Check the interpreter's version."""
    this, seen = sys.version_info[:2], f"{platform.python_version()} at {sys.executable}"
    if this < _OLDEST:
        yield wrong(seen, f"Install Python {_OLDEST[0]}.{_OLDEST[1]} or newer.")
    elif this > _NEWEST:
        yield warning(seen, f"Use Python {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}: others are untested.")
    else:
        yield ok(seen)


def packages_fit(machine: MachineView) -> Iterator[Finding]:
    """Compare the versions that packages require, and the builds (cpu, cu128, ...), with the installed ones."""
    from packaging.requirements import Requirement

    installed = {name: package for name in _PACKAGES if (package := _installed(machine, name)) is not None}
    fits = 0
    for name, package in installed.items():
        for text in package.requires or []:
            requirement = Requirement(text)
            is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            other = _installed(machine, requirement.name) if is_wanted else None
            if other is None:
                continue
            if requirement.specifier.contains(other.version, prereleases=True):
                fits += 1
                continue
            yield wrong(
                f"{name} {package.version} requires {requirement.name}{requirement.specifier}, and "
                f"{requirement.name} is {other.version}",
                f'Install versions that fit each other: pip install "{requirement.name}{requirement.specifier}", or '
                f"a {name} made for {requirement.name} {other.version.partition('+')[0]}.",
            )
    builds = {name: package.version.partition("+")[2] for name, package in installed.items()}
    for name in _BUILT_FOR_TORCH:
        if builds.get("torch") and builds.get(name) and builds[name] != builds["torch"]:
            yield wrong(
                f"{name} {installed[name].version} was built for another torch than {installed['torch'].version}",
                f"Install {name} and torch from the same index (both for the CPU, or both for the same CUDA).",
            )
    if fits:
        shown = (name for name in ("torch", "transformers", "deepspeed") if name in installed)
        yield ok(f"{', '.join(f'{name} {installed[name].version}' for name in shown)}: {fits} requirements hold")


def _installed(machine: MachineView, name: str) -> metadata.Distribution | None:
    return next(iter(metadata.distributions(name=name, path=list(machine.search_path))), None)


def compiler(machine: MachineView) -> Iterator[Finding]:
    """Look for the compiler that torch.compile and DeepSpeed's operators need."""
    search = machine.environ.get("PATH", os.defpath)
    named = machine.environ.get("CXX", "").split()
    names = named[:1] or ["c++", "g++", "clang++"]
    program = next((path for name in names if (path := shutil.which(name, path=search))), None)
    if program is None:
        what = f"CXX={' '.join(named)} is no program" if named else "no C++ compiler in PATH (c++, g++, clang++)"
        yield warning(
            f"{what}: torch.compile and DeepSpeed's offloaded optimizers fail",
            "Set CXX to a compiler." if named else "Install one (apt-get install g++), or leave compilation out.",
        )
    elif not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield warning(
            f"{program}, and Python.h is missing: Triton's and C++ extensions fail to compile",
            "Install the headers of this Python (apt-get install python3-dev).",
        )
    else:
        yield ok(program)


# --- torch, accelerators --------------------------------------------------------------------------------------------


def torch_imports(machine: MachineView) -> Iterator[Finding]:
    """Import torch and check its version."""
    began = time.monotonic()
    try:
        import torch
    except ModuleNotFoundError as error:
        missing = error.name or "torch"
        yield wrong(f"{missing} isn't installed", f"Install it: pip install {missing}.")
        return
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        yield wrong(f"importing torch fails: {reason}", "Install torch again, for this machine's CUDA or for the CPU.")
        return
    seconds, version, hip = time.monotonic() - began, str(torch.__version__), torch.version.hip
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    seen = f"{version}, built for {build}, in {os.path.dirname(torch.__file__)}"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < _OLDEST_TORCH:
        yield wrong(seen, f"Install torch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or newer.")
    elif seconds > _SLOW_IMPORT_S:
        yield warning(f"{seen}: its import took {seconds:.0f} s", "Install Python's packages on a local disk.")
    else:
        yield ok(seen)


def accelerators(machine: MachineView) -> Iterator[Finding]:
    """List the accelerators that torch finds; report hardware that it doesn't find."""
    try:
        import torch
    except Exception:  # `torch_imports` reports it
        return
    current = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if current is not None else 0
    if current is None or not count:
        gpus = [name for name in machine.names("dev") if re.fullmatch(r"nvidia\d+", name)]
        hidden = machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or machine.device == "cpu"
        if gpus and not hidden:
            yield not_usable(machine, len(gpus), torch.version.cuda)
        else:
            yield not_here("torch finds no accelerator; runs compute on the CPU")
        return
    module: Any = torch.get_device_module(current)
    devices = map(module.get_device_properties, range(count))
    kinds = Counter(f"{device.name} ({size(device.total_memory)})" for device in devices)
    seen = f"{count} of {current.type}: " + ", ".join(f"{number} x {name}" for name, number in kinds.items())
    if len(kinds) > 1:
        yield warning(f"{seen}: the slowest sets the pace", "Choose equal ones, with CUDA_VISIBLE_DEVICES.")
    else:
        yield ok(seen)
    if current.type == "cuda" and torch.version.cuda:
        yield from nvidia(machine, torch, count)


def _driver(machine: MachineView) -> str:
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", machine.text("proc/driver/nvidia/version") + " ")
    return match[1] if match else ""


def not_usable(machine: MachineView, count: int, cuda: str | None) -> Finding:
    """Return why torch finds none of the machine's NVIDIA GPUs."""
    version = _driver(machine)
    seen = f"this machine has {count} NVIDIA GPU{'s' * (count > 1)}, and torch finds none"
    if cuda is None:
        return warning(
            f"{seen}: it is built for the CPU", "Install torch for CUDA, from the index of its CUDA version."
        )
    if not version:
        return wrong(f"{seen}: no driver is loaded", "Load NVIDIA's driver: run nvidia-smi, and see dmesg.")
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(version.split(".")[0]) < oldest:
        remedy = f"Update the driver to {oldest} or newer, or install a torch for an older CUDA."
        return wrong(f"{seen}: driver {version} is too old for CUDA {cuda}", remedy)
    return wrong(
        f"{seen}: driver {version}, CUDA {cuda}", "Run nvidia-smi, and see dmesg for errors (Xid) of the GPUs."
    )


def nvidia(machine: MachineView, torch: Any, count: int) -> Iterator[Finding]:
    """Check driver, NCCL and whether the GPUs reach each other; torch finds at least one."""
    version, cuda = _driver(machine), torch.version.cuda
    if not torch.distributed.is_nccl_available():
        yield wrong("this torch has no NCCL, so GPUs can't exchange gradients", "Install an official build of torch.")
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield ok(f"driver {version or 'unknown'}, CUDA {cuda}, NCCL {nccl}")
    pairs = [(first, second) for first in range(count) for second in range(count) if first != second]
    if apart := [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]:
        yield warning(
            f"{len(apart)} of {len(pairs)} pairs of GPUs can't read each other's memory, such as {apart[0][0]} and "
            f"{apart[0][1]}",
            "See nvidia-smi topo -m; disable ACS in the firmware, or train on GPUs of one switch.",
        )
