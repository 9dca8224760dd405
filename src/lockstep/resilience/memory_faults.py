"""Faults of kind `oom`: micro-batches above a size raise torch's out-of-memory error, in the middle of the model."""

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
    """The model of a run and its data, to plant faults in.

    Attributes:
        samples: Returns how many samples of a micro-batch count, in training (true) or in an evaluation.
        positions: Returns where an update's samples begin in the order of the run, and where they end (exclusive).
        first_module: The first module with outputs that this rank uses.
    """

    model: nn.Module
    step: GradientStep
    samples: Callable[[bool], int]
    positions: Callable[[int], tuple[int, int]]
    first_module: nn.Module


def plant_in(trained: Trained, phase: str, runs_out: Callable[[bool], bool]) -> None:
    """Let a phase (forward, backward, optimizer, evaluation) raise when `runs_out`, called with True in training."""

    def refuse(training: bool) -> None:
        if runs_out(training):
            raise torch.OutOfMemoryError(_MESSAGE)

    if phase == "optimizer":
        update = trained.step.update

        def refused(rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
            refuse(True)
            update(rate, divisor, keep)

        trained.step.update = refused  # type: ignore[method-assign]
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
