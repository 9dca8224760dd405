"""Checks that need torch itself: its import, its backends, the accelerators that it finds.

NVIDIA's particulars are in `doctor.nvidia`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from lockstep.core.formatting import size
from lockstep.doctor import nvidia
from lockstep.doctor.findings import Finding, MachineView, not_here, ok, warning, wrong

_OLDEST = (2, 11)


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
    version = str(torch.__version__)
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    seen = f"{version}, built for {build}, in {os.path.dirname(torch.__file__)}"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < _OLDEST:
        yield wrong(seen, f"Install torch {_OLDEST[0]}.{_OLDEST[1]} or newer.")
    elif time.monotonic() - began > 30:
        yield warning(
            f"{seen}: its import took {time.monotonic() - began:.0f} s", "Install Python's packages on a local disk."
        )
    else:
        yield ok(seen)


def gloo(machine: MachineView) -> Iterator[Finding]:
    """Check that torch has distributed training, and gloo."""
    torch = _torch()
    if torch is None:
        return
    if not torch.distributed.is_available():
        yield wrong("this torch has no torch.distributed", "Install an official build of torch for Linux.")
    elif not torch.distributed.is_gloo_available():
        yield wrong("this torch has no gloo", "Install an official build of torch for Linux.")
    else:
        yield ok("part of torch")


def accelerators(machine: MachineView) -> Iterator[Finding]:
    """List the accelerators that torch finds; report hardware that it doesn't find."""
    torch = _torch()
    if torch is None:
        return
    present = nvidia.devices(machine)
    current = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if current is not None else 0
    if not count:
        if present and machine.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and machine.device != "cpu":
            yield nvidia.not_usable(machine, len(present), torch.version.cuda)
        else:
            yield not_here("torch finds no accelerator; runs compute on the CPU")
        return
    module: Any = torch.get_device_module(current)
    properties = [module.get_device_properties(index) for index in range(count)]
    kinds: dict[str, int] = {}
    for device in properties:
        name = f"{device.name} ({size(device.total_memory)})"
        kinds[name] = kinds.get(name, 0) + 1
    seen = f"{count} of {current.type}: " + ", ".join(f"{number} x {name}" for name, number in kinds.items())
    if len(kinds) > 1:
        yield warning(f"{seen}: the slowest sets the pace", "Choose equal ones, with CUDA_VISIBLE_DEVICES.")
    else:
        yield ok(seen)
    if current.type == "cuda" and torch.version.cuda:
        yield from nvidia.details(machine, torch, count)


def _torch() -> Any:
    """Return torch; None if it can't be imported, which `torch_imports` reports."""
    try:
        import torch
    except Exception:
        return None
    return torch
