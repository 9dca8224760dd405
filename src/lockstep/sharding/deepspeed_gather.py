"""Stage 3 in bf16 or fp16: weights are gathered in the precision in which they are used.

    at rest      fp32 shards, which the optimizer updates
                    | cast, gathered: 2 bytes an element
    forward      weight in bf16 --> autocast has nothing to cast, autograd saves the parameter and no copy

DeepSpeed's own bf16 mode would gather every parameter in bf16, and keep the stream between blocks in bf16 too, as an
embedding's output has its weight's dtype: another run than the single process's. Here only those weights are gathered
in bf16 that autocast rounds to it anyway, so that losses are bitwise identical. DeepSpeed's `torch_autocast` gathers
such weights in bf16, but leaves fp32 copies of them, which autocast casts again.

The names of DeepSpeed that are used here are private to it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_COMM_DTYPE = "comm_dtype"  # deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME


def gather_in(dtype: torch.dtype, names: Collection[str], model: nn.Module, zero: Any) -> None:
    """Let DeepSpeed's stage 3 gather these weights in `dtype`.

    Args:
        names: Parameters that autocast casts to it wherever they are used.
        zero: DeepSpeed's optimizer around the model.
    """
    if zero.partition_count == 1:
        return  # nothing is gathered
    _keep_dtype_of_gathered()
    for name, parameter in model.named_parameters():
        weight: Any = parameter
        if name in names and not weight.ds_persist:  # those are always there, and gathered once an update
            setattr(weight, _COMM_DTYPE, dtype)
            weight.data = torch.empty(0, dtype=dtype, device=weight.device)
    zero.dtype = torch.bfloat16  # else a gradient larger than a bucket is reduced in its own dtype, not in fp32


def _keep_dtype_of_gathered() -> None:
    """Replace the ends of DeepSpeed's gathers, which cast what they have gathered to the dtype of the shards."""
    from deepspeed.runtime.zero import partition_parameters

    single: Any = partition_parameters.AllGatherHandle
    several: Any = partition_parameters.AllGatherCoalescedHandle
    begin, wait = single.__init__, several.wait
    if begin.__module__ == __name__:
        return  # an earlier session has

    def begin_single(
        handle: Any,
        work: Any,
        param: Any,
        quantization: Any = None,
        param_buffer: Any = None,
        original_dtype: torch.dtype | None = None,
    ) -> None:
        kept = original_dtype if param_buffer is None else param.dtype
        begin(handle, work, param, quantization, param_buffer, kept)

    def end_several(handle: Any, handle_dependency: bool = True) -> None:
        if handle.complete or handle.params[0].dtype == handle.params[0].ds_tensor.dtype:
            wait(handle, handle_dependency)
        else:
            _end_gather(handle)

    single.__init__, several.wait = begin_single, end_several


def _end_gather(handle: Any) -> None:
    """Set the parameters to what has been gathered, in its dtype."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    handle.allgather_handle.wait()
    waits_in_stream = not get_accelerator().is_synchronized_device()
    offset = 0
    for parameter in handle.params:
        length = parameter.ds_tensor.ds_numel  # of each rank's shard, the last ones perhaps padded
        shards = [
            partition.narrow(0, offset, min(parameter.ds_numel - rank * length, length))
            for rank, partition in enumerate(handle.partitions)
            if rank * length < parameter.ds_numel
        ]
        parameter.data = torch.cat(shards).view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
        for shard in shards if waits_in_stream else ():
            shard.record_stream(get_accelerator().current_stream())
        offset += length
    handle.complete = True
