"""DeepSpeed's accelerator is the run's device.

DeepSpeed takes the first GPU that it finds, also for a run on the CPU, and keeps its choice for the whole process.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import torch

_NAMES = ("cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")


def use_accelerator(device: torch.device) -> None:
    """Let DeepSpeed, which this imports, work on the device."""
    os.environ.setdefault("DS_ACCELERATOR", device.type if device.type in _NAMES else "cpu")  # read by its import
    if "LOCAL_WORLD_SIZE" in os.environ:  # else the CPU calls numactl for each gradient that it reduces
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    from deepspeed.accelerator import real_accelerator

    if device.type not in _NAMES:
        real_accelerator.set_accelerator(_torch_accelerator(device))
    elif real_accelerator.get_accelerator().device_name() != device.type:
        module = importlib.import_module(f"deepspeed.accelerator.{device.type}_accelerator")
        own = next(value for name, value in vars(module).items() if name.lower() == f"{device.type}_accelerator")
        real_accelerator.set_accelerator(own())


class _TorchMethods:
    """The methods of an accelerator that DeepSpeed has no class for; what is compiled for it is the CPU's."""

    _name: str
    _torch: Any

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return self._torch.device(self._torch.current_device() if device_index is None else device_index)

    def current_device_name(self) -> str:
        return f"{self._name}:{self._torch.current_device()}"

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._torch.mem_get_info()[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self._torch.mem_get_info()[0])

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name


_OF_TORCH = (
    "set_device", "current_device", "device_count", "synchronize", "stream", "current_stream", "default_stream",
    "empty_cache", "memory_allocated", "max_memory_allocated",
)  # fmt: skip
"""The methods that are functions of torch's module of the device."""


def _torch_accelerator(device: torch.device) -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    module: Any = torch.get_device_module(device)
    made = partial(torch.tensor, device=device)
    dtypes = {"Float": torch.float32, "Byte": torch.uint8, "Int": torch.int32, "Long": torch.int64}
    members: dict[str, Any] = {"Stream": module.Stream, "Event": module.Event, "_torch": module, "_name": device.type}
    members |= {f"{name}Tensor": staticmethod(partial(made, dtype=dtype)) for name, dtype in dtypes.items()}
    members |= {name: staticmethod(getattr(module, name)) for name in _OF_TORCH}
    accelerator: Any = type("TorchAccelerator", (_TorchMethods, CPU_Accelerator), members)()
    accelerator._name = device.type  # CPU_Accelerator's constructor sets its own
    return accelerator
