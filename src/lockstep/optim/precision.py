"""The precision of a forward, and the loss scale that fp16 needs.

auto --> bf16 where the processor has it, otherwise fp32
fp16 --> loss x scale --> backward --> gradient / scale --> finite? scale grows, at times : update discarded,
                                                                                      scale shrinks
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lockstep.config.schema import FSDPPrecision, LossScale
from lockstep.core.errors import RunFailed
from lockstep.optim.kernels import scale_update

_NOTHING: AbstractContextManager[object] = nullcontext()


def resolve_compute(compute: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device) -> torch.dtype | None:
    """Return the precision of autocast; None for fp32, which needs none."""
    if compute == "auto":
        return torch.bfloat16 if has_bf16(device) else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]


def needs_loss_scale(compute: torch.dtype | None, mixed: FSDPPrecision | None) -> bool:
    """Return whether some gradient passes through fp16: of the forward's autocast, or, under FSDP, of the parameters it
    gathers, its reduction, or the outputs that it casts.

    Args:
        compute: precision of autocast; None: fp32.
        mixed: FSDP's own precisions; None: the run is under another strategy.
    """
    return compute is torch.float16 or (mixed is not None and mixed.rounds_to_fp16)


def has_bf16(device: torch.device) -> bool:
    """Return whether the processor multiplies bf16 matrices natively (elsewhere they are emulated, and slow)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _cpu_has_bf16()


@cache
def _cpu_has_bf16() -> bool:
    """Read the kernel's list of flags, since torch 2.11 has no such function; False where there is no list."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {flag for line in text.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def autocast_context(dtype: torch.dtype | None, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the context of a forward; for fp32 one that does nothing, at no cost."""
    if dtype is None:
        return lambda: _NOTHING
    return partial(torch.autocast, device.type, dtype=dtype)


def set_tf32(allowed: bool) -> None:
    """Set whether fp32 matrix products and convolutions on NVIDIA GPUs may round their factors to TF32.

    Without a GPU nothing is set, since torch's switch also means the CPU's matrix units. This is the older of
    torch's two switches: with the newer one (`fp32_precision`), `torch.compile` fails in torch 2.13.
    """
    if not torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class LossScaler:
    """A loss scale that adapts: after `growth_interval` updates without overflow it grows, after one with, it shrinks
    (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). The sequence is that of `torch.amp.GradScaler`.

    On a GPU the scale lives there and the host never waits for it; elsewhere it is a float.

    Args:
        enabled: otherwise the scale is 1.0, always.
    """

    def __init__(self, section: LossScale, *, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._section = section
        self._scale: float | Tensor = section.initial if enabled else 1.0
        self._streak: int | Tensor = 0
        if enabled and device.type != "cpu":
            self._scale = torch.full((), section.initial, dtype=torch.float32, device=device)
            self._streak = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def scale(self) -> float | Tensor:
        """The factor of losses: 0-dim fp32 on a GPU. A value: `update` doesn't change what was read."""
        return self._scale

    def update(self, keep: bool | Tensor) -> None:
        """Adapt the scale after an update; `keep` is whether its gradient was finite."""
        if not self.enabled:
            return
        if isinstance(self._scale, Tensor):
            self._update_on_device(keep)
        elif keep:
            self._grow()
        else:
            self._scale, self._streak = self._scale * self._section.backoff_factor, 0

    def state(self) -> dict[str, float]:
        """Return the state that is saved: plain numbers. On a GPU the host waits for them."""
        return {"scale": float(self._scale), "streak": int(self._streak)} if self.enabled else {}

    def restore(self, state: dict[str, float]) -> None:
        """Resume from `state`; from an empty one (saved in another precision), from the beginning.

        Raises:
            RunFailed: the state holds something else.
        """
        if not self.enabled or not state:
            return
        if set(state) != {"scale", "streak"}:
            raise RunFailed(f"the loss scale's state should hold scale and streak, but holds {', '.join(state)}")
        if isinstance(self._scale, Tensor) and isinstance(self._streak, Tensor):
            self._scale = torch.full_like(self._scale, state["scale"])
            self._streak = torch.full_like(self._streak, int(state["streak"]))
        else:
            self._scale, self._streak = float(state["scale"]), int(state["streak"])

    def _grow(self) -> None:
        assert not isinstance(self._scale, Tensor)
        assert not isinstance(self._streak, Tensor)
        self._streak += 1
        if self._streak < self._section.growth_interval:
            return
        self._streak = 0
        grown = self._scale * self._section.growth_factor
        if grown <= torch.finfo(torch.float32).max:  # as on a GPU, where the scale is fp32
            self._scale = grown

    def _update_on_device(self, keep: bool | Tensor) -> None:
        assert isinstance(self._scale, Tensor)
        assert isinstance(self._streak, Tensor)
        overflow = self._scale.new_tensor(not keep) if isinstance(keep, bool) else keep.logical_not().float()
        section, scale = self._section, self._scale.clone()  # whoever has read the old one keeps it
        scale_update(
            scale, self._streak, overflow, section.growth_factor, section.backoff_factor, section.growth_interval
        )
        self._scale = scale
