"""Calls whose backward computes them again.

                 forward                               backward
    kept         x -> call -> y     all in between     x <- gradients of the call
    full         x -> call -> y     x                  x -> call again, with the draws and autocast it had -> gradients
    selective    x -> call -> y     x, and what        x -> call again but for those -> gradients
                                    products made

Full: Chen et al. 2016, arXiv:1604.06174. Selective keeps what is expensive to compute and small to keep, matrix
products and attention, and computes again what lies between them (Korthikanti et al. 2022, arXiv:2205.05198, section
4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.transforms.block_state import StateGuard

Context = AbstractContextManager[object]
_NOTHING: Context = nullcontext()

_EXPENSIVE = frozenset(
    operator
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if (operator := getattr(getattr(torch.ops.aten, name, None), "default", None)) is not None
)  # fmt: skip
"""Operators whose results selective keeps: torch's matrix products and attentions that this version has."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Makes calls that are computed again. It is copied with its model.

    Attributes:
        selective: Whether the results of products and attention are kept.
        muted: Makes the context of the second forward, in which logging is dropped: the first has logged the same.
    """

    selective: bool = False
    muted: Callable[[], Context] = nullcontext

    def __call__(self, guard: StateGuard, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Return `forward`'s result.

        Args:
            guard: Checks the first calls of the blocks that `forward` computes.
        """
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        checks = guard.begin() and not torch.compiler.is_compiling()
        # torch searches the positional inputs alone for tensors, whose device's generator it restores
        call = partial(_call, forward, tuple(named)) if named else forward
        given = (*inputs, *named.values())
        kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
        if torch.compiler.is_compiling():  # the compiler supports no contexts but dispatch modes
            if self.selective:
                kept["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(call, *given, **kept)
        kept["context_fn"] = partial(self._first_and_second, guard, checks)
        if not checks:
            return checkpoint(call, *given, **kept)
        kept["early_stop"] = guard.stops_early  # else the last operations, too, are computed again and checked
        with guard.forward(given):
            return checkpoint(call, *given, **kept)

    def _first_and_second(self, guard: StateGuard, checks: bool) -> tuple[Context, Context]:
        first, second = _NOTHING, _NOTHING
        if self.selective:
            first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        return first, _Second(guard, (guard.again() if checks else _NOTHING, second), self.muted)


def replace_forward(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of a block."""
    cast("Any", block).forward = forward
    cast("Any", block)._computed_again = True  # in the block, so that a copy of it is marked, too


def is_replaced(block: nn.Module) -> bool:
    """Return whether the block's forward was replaced."""
    return "_computed_again" in vars(block)


def _call(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    """Call with the last inputs by name."""
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _policy(_context: object, operator: object, *_inputs: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


class _Second(ExitStack):
    """The context of a second forward. A gradient of a gradient enters it once more."""

    def __init__(self, guard: StateGuard, contexts: Iterable[Context], muted: Callable[[], Context]) -> None:
        super().__init__()
        self._guard, self._weights = guard, guard.weights()
        self._contexts = contexts
        self._muted = muted

    def __enter__(self) -> Self:
        self._guard.check_weights(self._weights)
        for context in (*self._contexts, self._muted()):
            self.enter_context(context)
        return self
