"""Products of groups of rows with a matrix each, as experts have them, on the simulated device.

torch's own function for shapes takes bf16 alone; the kernel for GPUs takes fp32 and fp16, too. Autocast knows none.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes of which the kernel wants strides to be multiples


def grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the shape of `torch._grouped_mm`, whose arguments these are.

    Raises:
        RuntimeError: The kernel would refuse them.
    """
    if left.dtype != right.dtype:
        raise RuntimeError(f"_grouped_mm expects matrices of one dtype, but got {left.dtype} and {right.dtype}")
    for matrix in (left, right):
        if max(matrix.stride()[-2:]) * matrix.element_size() % _ALIGNMENT:
            raise RuntimeError(f"_grouped_mm expects strides of a multiple of 16 bytes, but got {matrix.stride()}")
    if left.dim() == right.dim() == 2:
        assert offs is not None, "two matrices are divided into groups"
        shape = [len(offs), left.shape[0], right.shape[1]]
    elif left.dim() == 2:
        shape = [left.shape[0], right.shape[2]]
    elif right.dim() == 2:
        shape = [left.shape[1], right.shape[1]]
    else:
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)
