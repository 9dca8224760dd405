"""Activation checkpointing: which activations a forward keeps for the backward, and which are recomputed.

Full keeps a block's inputs: Chen et al. 2016, arXiv:1604.06174. Selective also keeps what is expensive to compute and
small: matrix products and attention (Korthikanti et al. 2022, arXiv:2205.05198, section 4).

A block's own `forward` is replaced, so that no name changes, and FSDP's hooks run around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import Transform
from lockstep.transforms.block_state import StateGuard

if TYPE_CHECKING:
    from lockstep.config.schema import ActivationCheckpointing

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
"""Operators with results that selective keeps: torch's matrix products and attentions in this version."""


def _recomputed(
    selective: bool,
    muted: Callable[[], Context],
    guard: StateGuard,
    forward: Callable[..., Any],
    *inputs: Any,
    **named: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    checks = guard.begin() and not torch.compiler.is_compiling()
    # torch searches only the positional inputs for tensors, and restores the generator of their device
    call = partial(_call, forward, tuple(named)) if named else forward
    given = (*inputs, *named.values())
    kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if torch.compiler.is_compiling():  # the compiler supports no contexts but dispatch modes
        if selective:
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(call, *given, **kept)
    kept["context_fn"] = partial(_contexts, selective, muted, guard, checks)
    if not checks:
        return checkpoint(call, *given, **kept)
    kept["early_stop"] = guard.stops_early  # else the last operations, too, are computed again and checked
    with guard.forward(given):
        return checkpoint(call, *given, **kept)


def _contexts(
    selective: bool, muted: Callable[[], Context], guard: StateGuard, checks: bool
) -> tuple[Context, Context]:
    first, second = _NOTHING, _NOTHING
    if selective:
        first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return first, _Second(guard, second, muted, checks)


def _call(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _policy(_context: object, operator: object, *_inputs: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


class _Second(ExitStack):
    """The context of a second forward. A gradient of a gradient enters it once more."""

    def __init__(self, guard: StateGuard, context: Context, muted: Callable[[], Context], checks: bool) -> None:
        super().__init__()
        self._guard, self._weights = guard, guard.weights()
        self._context = context
        self._muted = muted
        self._checks = checks

    def __enter__(self) -> Self:
        self._guard.check_weights(self._weights)
        if self._checks:
            self.enter_context(self._guard.again())
        self.enter_context(self._context)
        self.enter_context(self._muted())
        return self


_CHANGED_BY_FORWARD = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_KEY = "memory.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The modules of a model that are computed again.

    Attributes:
        mode: The mode in the config.
        blocks: Names of the modules with a replaced forward.
    """

    mode: str
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.blocks[:3]) + (f" and {len(self.blocks) - 3} more" if len(self.blocks) > 3 else "")
        return f"activation checkpointing, {self.mode}: {shown}"


class RecomputeBlocks(Transform):
    """Replaces the forwards of blocks, the model's repeated layers, by ones that keep less.

    Args:
        muted: Makes the context of the second forward, where logging is dropped: the first has logged the same.
    """

    name = _KEY
    after = ("parallel.ddp.sync_batchnorm",)

    def __init__(
        self, options: ActivationCheckpointing, blocks: Sequence[str], muted: Callable[[], Context] = nullcontext
    ) -> None:
        self._options = options
        self._blocks = blocks
        self._muted = muted

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        chosen = self.chosen(model)
        if not chosen and self._options.modules != "blocks":
            return f"{none_of(model, self._options.modules)}; name classes that it has"
        if not chosen:
            return (
                f"a {type(model).__name__} has no repeated blocks: a ModuleList or Sequential of layers of one class; "
                "give it such a list, name classes (in a config memory.activation_checkpointing.modules, in Python "
                "blocks=[...]), or leave activation checkpointing out"
            )
        return _inside_of_another(chosen) or _already(model, chosen) or _running_means(model, chosen)

    def apply(self, model: nn.Module) -> nn.Module:
        selective = self._options.mode == "selective"
        for name in self.chosen(model):
            block: Any = model.get_submodule(name)
            # A partial of the bound method, which a copy of the model copies
            guard = StateGuard(name, block)
            block.forward = partial(_recomputed, selective, self._muted, guard, block.forward)
            block._computed_again = True  # in the block, so that a copy of it is marked, too
        return model

    def applied(self, model: nn.Module) -> Recomputation:
        """Apply the transform; return the modules that are computed again."""
        self.apply(model)
        return Recomputation(self._options.mode, tuple(self.chosen(model)))

    def chosen(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that are computed again."""
        wanted = self._options.modules
        if wanted == "blocks":
            return list(self._blocks[:: self._options.every])
        names = [name for name, module in model.named_modules() if name and type(module).__name__ in wanted]
        return names[:: self._options.every]


def refuse(reason: str | None) -> None:
    """Raise ConfigError if there is a reason."""
    if reason is not None:
        raise ConfigError(Problem("", _KEY, reason))


def none_of(model: nn.Module, classes: Sequence[str]) -> str:
    """Return the message that the model has no module of these classes, and which it has."""
    kinds = list(dict.fromkeys(type(module).__name__ for name, module in model.named_modules() if name))
    return f"a {type(model).__name__} has no module of class {' or '.join(classes)}; it has {', '.join(kinds[:12])}"


def _inside_of_another(chosen: Sequence[str]) -> str | None:
    for name in chosen:
        for other in chosen:
            if other.startswith(f"{name}."):
                return f"{other} is in {name}, and would be computed three times; name one of their classes"
    return None


def _already(model: nn.Module, chosen: Sequence[str]) -> str | None:
    """Return the message that a block, a module around it or a module inside it was replaced before."""
    before = [f"{name}." for name, module in model.named_modules() if "_computed_again" in vars(module)]
    for name in chosen:
        for other in before:
            if f"{name}.".startswith(other) or other.startswith(f"{name}."):
                return f"{other[:-1]} is computed again already, by an earlier call; leave one of the two out"
    return None


def _running_means(model: nn.Module, chosen: Sequence[str]) -> str | None:
    for block in chosen:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if isinstance(module, _CHANGED_BY_FORWARD) and module.track_running_stats:
                return (
                    f"{name} keeps running means, which a second forward would count twice; use a norm without "
                    "them, such as group norm, or leave activation checkpointing out"
                )
    return None
