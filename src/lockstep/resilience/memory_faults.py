"""Faults of kind `oom`: the memory of a rank ends, as it seems, for micro-batches above a size.

    {"kind": "oom", "rank": 1, "step": 7, "phase": "backward", "above": 4}

From update 7 on, each backward with micro-batches of more than 4 samples raises torch's out-of-memory error on rank 1:
in the middle of the model, below whatever wraps it. Unlike other faults it stays, until micro-batches are smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from lockstep.core.protocols import GradientStep

_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB. (planted)"


@dataclass(frozen=True, slots=True)
class Trained:
    """The model of a run and its data, in which faults are planted.

    Attributes:
        step: Its optimizer's step is the method `update`.
        samples: Returns how many samples of a micro-batch count, in training (true) or in an evaluation.
        positions: Returns between which positions in the order of the run an update has its samples.
        first_module: The one whose outputs are the first that this rank uses.
    """

    model: nn.Module
    step: GradientStep
    samples: Callable[[bool], int]
    positions: Callable[[int], tuple[int, int]]
    first_module: nn.Module


def plant_in(trained: Trained, phase: str, runs_out: Callable[[bool], bool]) -> None:
    """Let a phase of a run raise.

    Args:
        phase: forward, backward, optimizer or evaluation.
        runs_out: Returns whether memory runs out now, in training (true) or in an evaluation.
    """

    def refuse(training: bool) -> None:
        if runs_out(training):
            raise torch.OutOfMemoryError(_MESSAGE)

    if phase == "optimizer":
        update = trained.step.update

        def refused(rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
            refuse(True)
            update(rate, divisor, keep)

        trained.step.update = refused  # type: ignore[method-assign]
        return

    if getattr(trained.model, "_compiled_call_impl", None) is not None:
        _plant_around(trained.model, phase, refuse)
    else:
        _plant_within(trained.model, phase, refuse)


def _before(phase: str, refuse: Callable[[bool], None], module: nn.Module, *_: Any) -> None:
    if phase != "backward" and module.training == (phase == "forward"):
        refuse(module.training)


def _after(phase: str, refuse: Callable[[bool], None], output: Any) -> bool:
    """Let the backward through an output raise; return whether there will be one."""
    outputs = (value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad)
    first: Any = next(outputs, None) if phase == "backward" else None
    if first is not None:
        first.register_hook(lambda gradient: refuse(True))
    return first is not None


def _plant_around(model: nn.Module, phase: str, refuse: Callable[[bool], None]) -> None:
    """Let a compiled model raise: hooks of its layers would be compiled, into graphs that round otherwise."""
    compiled: Any = model._compiled_call_impl

    def call(*inputs: Any, **named: Any) -> Any:
        _before(phase, refuse, model)
        output = compiled(*inputs, **named)
        _after(phase, refuse, output)
        return output

    model._compiled_call_impl = call


def _plant_within(model: nn.Module, phase: str, refuse: Callable[[bool], None]) -> None:
    """Let a layer in the middle of a model raise; or the whole, which may use the parameters of its layers itself."""
    is_planted = False  # in this forward

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal is_planted
        is_planted |= _after(phase, refuse, output)

    def after_all(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal is_planted
        _before(phase, refuse, module)
        if not is_planted:
            _after(phase, refuse, output)
        is_planted = False

    leaves = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    for leaf in leaves[len(leaves) // 2 :]:
        leaf.register_forward_pre_hook(partial(_before, phase, refuse))
        leaf.register_forward_hook(after)
    model.register_forward_hook(after_all)
