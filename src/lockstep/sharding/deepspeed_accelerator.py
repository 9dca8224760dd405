"""DeepSpeed's accelerator is the run's device.

    cpu, cuda, xpu, npu, ...     DeepSpeed's own class, by name
    another device of torch's    `TorchAccelerator`, which asks torch's module of the device

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
        return self._torch.device(self.current_device() if device_index is None else device_index)

    def set_device(self, device_index: int) -> None:
        self._torch.set_device(device_index)

    def current_device(self) -> int:
        return int(self._torch.current_device())

    def current_device_name(self) -> str:
        return f"{self._name}:{self._torch.current_device()}"

    def device_count(self) -> int:
        return int(self._torch.device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        self._torch.synchronize()

    def stream(self, stream: Any) -> Any:
        return self._torch.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._torch.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._torch.default_stream()

    def empty_cache(self) -> None:
        self._torch.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._torch.memory_allocated())

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._torch.max_memory_allocated())

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {}

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._torch.mem_get_info()[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self._torch.mem_get_info()[0])

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name


def _torch_accelerator(device: torch.device) -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    module: Any = torch.get_device_module(device)
    made = partial(torch.tensor, device=device)
    dtypes = {"Float": torch.float32, "Byte": torch.uint8, "Int": torch.int32, "Long": torch.int64}
    constructors = {f"{name}Tensor": staticmethod(partial(made, dtype=dtype)) for name, dtype in dtypes.items()}
    members = {"Stream": module.Stream, "Event": module.Event, "_torch": module, **constructors}
    accelerator: Any = type("TorchAccelerator", (_TorchMethods, CPU_Accelerator), members)()
    accelerator._name = device.type
    return accelerator
