"""The private names of torch that this package calls, each with the reason; all others are torch's public API.

fused_adamw, fused_adam, fused_sgd
    The kernels behind `torch.optim.*(fused=True)`. `Optimizer.step` spends 35 to 50 us of Python around a kernel of
    7 us (four parameters of width 64, one CPU core): it collects lists, groups them by device, and enters the
    profiler. Called directly on lists that were made once, an update costs little more than its arithmetic.
    They divide gradients by `grad_scale`, and change nothing where `found_inf` is 1. The caller counts steps.
flatten
    Concatenates tensors without a Python call for each: 4.8 instead of 7.5 us for four. A single tensor is returned
    itself, not copied, so callers may only read the result.
scale_update
    The arithmetic of `torch.amp.GradScaler.update` in one kernel on the device, without the host waiting for it.

`tests/optim/test_kernels.py` compares each with torch's public API, so that a release that changes them is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

fused_adamw: Callable[..., None] = torch._fused_adamw_
fused_adam: Callable[..., None] = torch._fused_adam_
fused_sgd: Callable[..., None] = torch._fused_sgd_

_native: Any = torch._C._nn
flatten: Callable[[Sequence[Tensor]], Tensor] = _native.flatten_dense_tensors

scale_update: Callable[[Tensor, Tensor, Tensor, float, float, int], Tensor] = torch._amp_update_scale_
