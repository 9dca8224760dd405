"""Context parallelism of a model: its attention becomes ring attention while sequences are divided."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import Transform
from lockstep.distributed.forward_mode import ForwardMode, SequencePartition, current_sequences
from lockstep.transforms.ring_attention import ring_attention

_KEY = "parallel.context"
_NAME = "lockstep_ring"


class ContextParallel(Transform):
    """Prepares a model for sequences that are divided over ranks.

    Attributes:
        takes_mask: Whether the model passes its padding mask to its attention, which uses the division's instead.
        takes_positions: Whether its forward takes `position_ids`, as in the transformers library.
    """

    name = _KEY
    after = ("parallel.pipeline",)

    def __init__(self, degree: int, mode: ForwardMode, *, allow_untested: bool) -> None:
        self.takes_mask = False
        self.takes_positions = False
        self._degree = degree
        self._mode = mode
        self._allow_untested = allow_untested
        self._configs: list[Any] = []
        self._usual: list[str] = []

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        if device.type != "cpu" and not self._allow_untested:
            return f"{self._degree} was never tested on GPUs; --allow-untested tries it"
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        self._configs = _attention_configs(model)
        self._usual = [config._attn_implementation for config in self._configs]
        if self._configs:
            from transformers import AttentionInterface

            AttentionInterface.register(_NAME, _transformers_attention)
        self.takes_mask = bool(self._configs)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        return model

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enable `divide` while the block runs; after it sequences are whole."""
        with _RingForAttention(self._mode):
            try:
                yield
            finally:
                self.divide(None)

    def divide(self, division: SequencePartition | None) -> None:
        """Divide the sequences of the forwards and backwards that follow, inside `active`; None: they are whole."""
        self._mode.divide_sequences(division)
        for config, usual in zip(self._configs, self._usual, strict=True):
            config._attn_implementation = usual if division is None else _NAME


class _RingForAttention(TorchFunctionMode):
    """Computes `F.scaled_dot_product_attention` by ring attention where sequences are divided."""

    def __init__(self, mode: ForwardMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self._mode.sequences is not None:
            return _torch_attention(self._mode.sequences, *args, **(kwargs or {}))
        if func is Tensor.backward:  # the mode also serves blocks that are computed again in it
            with self:
                return _backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run what `Tensor.backward` runs, without leaving the mode: torch's public functions do (torch 2.13)."""
    seed = torch.ones_like(loss) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    reached = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    _engine_run_backward((loss,), (seed,), keep, create_graph, reached, allow_unreachable=True, accumulate_grad=True)


def _torch_attention(
    division: SequencePartition,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    _refuse_mask_and_dropout(attn_mask, dropout_p)
    return ring_attention(query, key, value, division, causal=is_causal, scale=scale)


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    _refuse_mask_and_dropout(attention_mask, dropout)
    division = current_sequences()
    assert division is not None, "sequences are divided"
    window = options.get("sliding_window")
    if window is not None and window < division.length:
        sees = f"lets tokens see {window} tokens back (sliding_window)"
        raise _unsupported(sees, "attention that sees everything before")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise _unsupported(f"gives its attention {name}", "plain attention")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    output = ring_attention(query, key, value, division, causal=causal, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def _refuse_mask_and_dropout(mask: Tensor | None, dropout: float) -> None:
    if mask is not None:
        raise _unsupported("makes a mask of its own for its attention", "attention that is causal, or sees everything")
    if dropout:
        why = (
            f"the model drops {dropout:g} of its attention weights, which are spread over ranks; set that dropout to 0 "
            "(in the transformers library: model.architecture.attention_dropout, attn_pdrop, or "
            "attention_probs_dropout_prob)"
        )
        raise ConfigError(Problem("", _KEY, why))


def _unsupported(does: str, takes: str) -> ConfigError:
    why = f"the model {does}, and ring attention is for {takes}; leave parallel.context out"
    return ConfigError(Problem("", _KEY, why))


def _attention_configs(model: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    choosing = {id(config): config for config in configs if getattr(config, "_attn_implementation", None) is not None}
    return list(choosing.values())
