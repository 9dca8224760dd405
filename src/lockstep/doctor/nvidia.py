"""NVIDIA's particulars: driver, NCCL, and how the GPUs of this machine are connected."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from lockstep.doctor.findings import Finding, MachineView, ok, warning, wrong

_SECONDS = 2.0
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version --> the oldest driver on which its minor versions run (CUDA Toolkit Release Notes, table 2)."""


def devices(machine: MachineView) -> list[str]:
    """Return the device files of the GPUs."""
    return [name for name in machine.names("dev") if re.fullmatch(r"nvidia\d+", name)]


def driver(machine: MachineView) -> str:
    """Return the version of the kernel's driver; empty if it has none."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", machine.text("proc/driver/nvidia/version") + " ")
    return match[1] if match else ""


def not_usable(machine: MachineView, count: int, cuda: str | None) -> Finding:
    """Return why torch finds none of the machine's GPUs."""
    version = driver(machine)
    seen = f"this machine has {count} NVIDIA GPU{'s' * (count > 1)}, and torch finds none"
    if cuda is None:
        return warning(
            f"{seen}: it is built for the CPU", "Install torch for CUDA, from the index of its CUDA version."
        )
    if not version:
        return wrong(f"{seen}: no driver is loaded", "Load NVIDIA's driver: run nvidia-smi, and see dmesg.")
    if _too_old(version, cuda):
        return wrong(f"{seen}: driver {version} is too old for CUDA {cuda}", _update(cuda))
    return wrong(
        f"{seen}: driver {version}, CUDA {cuda}", "Run nvidia-smi, and see dmesg for errors (Xid) of the GPUs."
    )


def details(machine: MachineView, torch: Any, count: int) -> Iterator[Finding]:
    """Check driver, NCCL and the GPUs' connections; torch finds at least one."""
    version, cuda = driver(machine), torch.version.cuda
    if version and _too_old(version, cuda):
        yield warning(f"driver {version} is older than CUDA {cuda} asks for", _update(cuda))
    else:
        yield ok(f"driver {version or 'unknown'}, CUDA {cuda}")
    if not torch.distributed.is_nccl_available():
        yield wrong("this torch has no NCCL, by which GPUs exchange gradients", "Install an official build of torch.")
    else:
        yield ok(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    if count > 1:
        yield _topology(torch, count)


def _topology(torch: Any, count: int) -> Finding:
    pairs = [(first, second) for first in range(count) for second in range(count) if first != second]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    links = sorted(set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", _matrix())))
    seen = f"{count} GPUs" + (f" connected by {', '.join(links)}" if links else "")
    if apart:
        first, second = apart[0]
        return warning(
            f"{seen}; {len(apart)} of {len(pairs)} pairs can't read each other's memory, such as {first} and {second}",
            "See nvidia-smi topo -m; disable ACS in the firmware, or train on GPUs of one switch.",
        )
    return ok(f"{seen}; each reads the memory of all others")


def _matrix() -> str:
    """Return the table of `nvidia-smi topo -m` without its legend; empty if it can't be had."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        result = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.partition("Legend")[0]


def _too_old(version: str, cuda: str) -> bool:
    return int(version.split(".")[0]) < _OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)


def _update(cuda: str) -> str:
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    return f"Update the driver to {oldest} or newer, or install a torch for an older CUDA."
