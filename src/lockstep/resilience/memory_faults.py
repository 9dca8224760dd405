"""Faults of kind `oom`: the memory of a rank ends, as it seems, for micro-batches above a size.

    {"kind": "oom", "rank": 1, "step": 7, "phase": "backward", "above": 4}

From update 7 on, each backward with micro-batches of more than 4 samples raises torch's out-of-memory error on rank 1:
in the middle of the model, below whatever wraps it. Unlike other faults it stays, until micro-batches are smaller;
those whose activations are all computed again count half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lockstep.config.training_sections import Memory
    from lockstep.core.protocols import GradientStep
    from lockstep.core.records import Batch

MEMORY_PHASES = ("forward", "backward", "optimizer", "evaluation")
_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB. (planted)"


@dataclass(frozen=True, slots=True)
class Trained:
    """The model of a run and its data, in which faults are planted.

    Attributes:
        step: Its optimizer's step is the method `update`.
        samples: Returns how many samples of a micro-batch count, in training (true) or in an evaluation.
        sample: Returns the first sample of an update on a rank, alone; it has no weight if it is left out.
        positions: Returns between which positions in the order of the run an update has its samples.
        first_module: The one whose outputs are the first that this rank uses.
    """

    model: nn.Module
    step: GradientStep
    samples: Callable[[bool], int]
    sample: Callable[[int, int], Batch]
    positions: Callable[[int], tuple[int, int]]
    first_module: nn.Module


def held_samples(micro_size: int, memory: Memory) -> int:
    """Return how many samples of a micro-batch count, with ways to save memory."""
    return micro_size // 2 if memory.activation_checkpointing.mode == "full" else micro_size


def plant_in(trained: Trained, phase: str, runs_out: Callable[[bool], bool]) -> None:
    """Let a phase of a run raise.

    Args:
        phase: One of `MEMORY_PHASES`.
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

    def before(module: nn.Module, inputs: Any) -> None:
        if module.training == (phase == "forward"):
            refuse(module.training)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: refuse(True))  # type: ignore[no-untyped-call]

    compiled = getattr(trained.model, "_compiled_call_impl", None)
    if compiled is not None:  # hooks of its layers would be compiled, into graphs that round otherwise

        def call(*inputs: Any, **named: Any) -> Any:
            if phase != "backward":
                before(trained.model, inputs)
            output = compiled(*inputs, **named)
            if phase == "backward":
                after(trained.model, inputs, output)
            return output

        trained.model._compiled_call_impl = call
        return
    leaves = [module for module in trained.model.modules() if next(module.parameters(recurse=False), None) is not None]
    for leaf in leaves[len(leaves) // 2 :]:
        if phase == "backward":
            leaf.register_forward_hook(after)
        else:
            leaf.register_forward_pre_hook(before)
