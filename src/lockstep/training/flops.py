"""Floating-point operations of a model for each token, for its share of the hardware's peak. A meter: what can't be
told is None, and nothing of it ends a run.

    a transformer of ours, a text model of the transformers library    a formula (models.transformer)
    any other                                                          torch's counter, in a forward and backward
                                                                       that computes nothing
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.config.schema import Loader
from lockstep.data.loader import evaluation_batches
from lockstep.engine.dry_run import unchanged
from lockstep.models.transformer import flops_per_token
from lockstep.monitor.metric_log import MetricLog, recording

if TYPE_CHECKING:
    from lockstep.core.protocols import Source
    from lockstep.core.records import Batch, Inputs

_LOG = logging.getLogger("lockstep")
_SAMPLES = 2


def training_flops(model: nn.Module, source: Source, device: torch.device) -> float | None:
    """Of forward and backward; where samples have no tokens, for each sample.

    Args:
        model: whole, on the CPU or without values.
        device: where it is trained. There is no peak to compare with but that of a GPU, so on a CPU nothing is counted.
    """
    found = None
    with suppress(Exception):
        found = flops_per_token(model, source.facts)
    if found is not None or device.type != "cuda":
        return found
    try:
        return counted_flops(model, next(evaluation_batches(source, _SAMPLES, 0, 1, Loader(), torch.device("cpu"))))
    except Exception as error:  # whatever a forward makes of tensors without values
        _LOG.debug("operations can't be counted: %r", error)
        return None


def counted_flops(model: nn.Module, batch: Batch) -> float:
    """By torch's counter, for each token of the batch."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def like(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    # the counter knows no fused attention of the CPU, but the products that it is made of
    with recording(MetricLog()), unchanged(model), fake, sdpa_kernel(SDPBackend.MATH):
        tensors = {name: like(one) for name, one in (*model.named_parameters(), *model.named_buffers())}
        with FlopCounterMode(display=False) as counter:
            arguments, named = _arguments(tree_map(_faked(like), batch.inputs))
            outputs = functional_call(model, tensors, arguments, named)
            reached = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
            total: Any = sum(one.float().sum() for one in reached)
            if reached:
                total.backward()
    return float(counter.get_total_flops()) / max(batch.tokens, 1)


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))


def _faked(like: Any) -> Any:
    return lambda value: like(value) if isinstance(value, Tensor) else value
