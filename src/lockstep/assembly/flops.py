"""Floating-point operations of a model per token, for its utilization of the hardware; None where they are unknown.

Lockstep's transformer, a text model of the transformers library    a formula (models.transformer)
other models                                                        torch's counter, on a fake forward and backward
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.data.loader import first_batch
from lockstep.engine.dry_run import unchanged
from lockstep.models.transformer import flops_per_token
from lockstep.monitor.metric_log import MetricLog, recording

if TYPE_CHECKING:
    from lockstep.core.protocols import Source
    from lockstep.core.records import Batch

_SAMPLES = 2


def training_flops(model: nn.Module, source: Source, device: torch.device) -> float | None:
    """Return the operations of forward and backward per token, or per sample where samples have no tokens.

    Args:
        device: where it is trained; a CPU has no known peak to compare with, so nothing is counted there.
    """
    flops = None
    with suppress(Exception):
        flops = flops_per_token(model, source.facts)
    if flops is not None or device.type == "cpu":
        return flops
    with suppress(Exception):  # a forward may do anything with fake tensors
        flops = counted_flops(model, first_batch(source, _SAMPLES))
    return flops


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Let the CPU compute attention and recurrent layers by matrix products: the counter knows no fused ones."""
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.enabled = enabled


def counted_flops(model: nn.Module, batch: Batch) -> float:
    """Return the operations per token of the batch, by torch's counter, without recomputation."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    class WithoutRecomputation(FlopCounterMode):
        """Leaves out what activation checkpointing computes again: forwards, with gradients, inside of a backward."""

        def _count_flops(self, *arguments: Any) -> Any:
            if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
                return arguments[1]
            return super()._count_flops(*arguments)  # type: ignore[no-untyped-call]

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        return empty.requires_grad_(value.requires_grad)

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with recording(MetricLog()), unchanged(model), fake_mode, _without_fused_layers():
        tensors = {name: fake(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        with WithoutRecomputation(display=False) as counter:
            inputs = tree_map(fake, batch.inputs)
            arguments, named = (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))
            outputs = functional_call(model, tensors, arguments, named)
            losses = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
            total: Any = sum(loss.float().sum() for loss in losses)
            if losses:
                total.backward()
    return float(counter.get_total_flops()) / max(batch.tokens, 1)
