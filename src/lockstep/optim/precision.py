"""The precision of a forward, and the loss scale that fp16 needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lockstep.config.schema import LossScale
from lockstep.core.errors import RunFailed
from lockstep.core.protocols import NO_CONTEXT
from lockstep.optim.kernels import scale_update


def resolve_compute(compute: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device) -> torch.dtype | None:
    """Return the precision of autocast; None for fp32, which needs none."""
    if compute == "auto":
        return torch.bfloat16 if has_bf16(device) else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]


def has_bf16(device: torch.device) -> bool:
    """Return whether the processor multiplies bf16 matrices natively (elsewhere they are emulated, and slow)."""
    if device.type == "cpu":
        return _cpu_has_bf16()
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return supported is not None and bool(supported())


@cache
def _cpu_has_bf16() -> bool:
    """Read the kernel's list of CPU flags, since torch 2.11 has no function for it; False where there is no list."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {flag for line in text.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def autocast_context(
    dtype: torch.dtype | None, device: torch.device, *, keeps_casts: bool = True
) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of autocast contexts for a forward; for fp32 of one that does nothing, at no cost.

    Args:
        keeps_casts: Keep a copy of each weight until a training forward ends, for weights that are used twice. Without
        a
            backward, or where blocks are computed again, the copies would be all that exists at once.
    """
    if dtype is None:
        return lambda: NO_CONTEXT
    if not keeps_casts:
        return partial(torch.autocast, device.type, dtype=dtype, cache_enabled=False)
    return lambda: torch.autocast(device.type, dtype=dtype, cache_enabled=torch.is_grad_enabled())


def set_tf32(allowed: bool) -> None:
    """Set whether fp32 matrix products and convolutions on NVIDIA GPUs may round their factors to TF32.

    Without a GPU nothing is set, since torch's switch also means the CPU's matrix units. This is the older of
    torch's two switches: with the newer one (`fp32_precision`), `torch.compile` fails in torch 2.13.
    """
    if not torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def products_in(dtype: torch.dtype | None, device: torch.device) -> str:
    """Return the precision of matrix products: autocast's, or `tf32` or `fp32` without one.

    TF32 follows torch's switch, which user code may have set.
    """
    if dtype is not None:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    rounds = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else "fp32"


class LossScaler:
    """A dynamic loss scale, with the same sequence of values as `torch.amp.GradScaler`.

    It grows after `growth_interval` updates without overflow and shrinks after each update with one (Micikevicius et
    al. 2018, arXiv:1710.03740, section 3.2). On a GPU the scale is a tensor there, and the host never waits for it.

    Attributes:
        scale: The factor of losses, 1.0 if not `enabled`; 0-dim fp32 on a GPU, where `update` makes a new tensor.
    """

    def __init__(self, section: LossScale, *, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._section = section
        self.scale: float | Tensor = section.initial if enabled else 1.0
        self._streak: int | Tensor = 0
        if enabled and device.type != "cpu":
            self.scale = torch.full((), section.initial, dtype=torch.float32, device=device)
            self._streak = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, keep: bool | Tensor) -> None:
        """Adapt the scale after an update; `keep` is whether its gradient was finite."""
        if not self.enabled:
            return
        section = self._section
        if isinstance(self.scale, Tensor):
            assert isinstance(self._streak, Tensor)
            overflow = self.scale.new_tensor(not keep) if isinstance(keep, bool) else keep.logical_not().float()
            self.scale = self.scale.clone()  # the value that was read before stays as it is
            scale_update(
                self.scale,
                self._streak,
                overflow,
                section.growth_factor,
                section.backoff_factor,
                section.growth_interval,
            )
        elif not keep:
            self.scale, self._streak = self.scale * section.backoff_factor, 0
        elif self._streak + 1 < section.growth_interval:
            self._streak += 1
        else:
            grown = self.scale * section.growth_factor
            fits_fp32 = grown <= torch.finfo(torch.float32).max  # as on a GPU, where the scale is fp32
            self.scale, self._streak = grown if fits_fp32 else self.scale, 0

    def state(self) -> dict[str, float]:
        """Return the state to save, as plain numbers. On a GPU the host waits for them."""
        return {"scale": float(self.scale), "streak": int(self._streak)} if self.enabled else {}

    def restore(self, state: dict[str, float]) -> None:
        """Resume from `state`; an empty one, saved in another precision, changes nothing.

        Raises:
            RunFailed: The state has other keys.
        """
        if not self.enabled or not state:
            return
        if set(state) != {"scale", "streak"}:
            raise RunFailed(f"the saved loss scale has the keys {', '.join(state)}; expected scale and streak")
        if isinstance(self.scale, Tensor) and isinstance(self._streak, Tensor):
            self.scale = torch.full_like(self.scale, state["scale"])
            self._streak = torch.full_like(self._streak, int(state["streak"]))
        else:
            self.scale, self._streak = float(state["scale"]), int(state["streak"])
