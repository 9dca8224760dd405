"""Training and evaluation modes of a model; each module has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation while the block runs, then restore each module's mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])
        for module, training in before:  # a module comes before those in it; a call lets it undo what eval() did
            if module.training is not training:
                module.train(training)


def in_training(model: nn.Module) -> nn.Module:
    """Return the model, set to training if it is in evaluation as a whole, as from `from_pretrained`."""
    return model if model.training else model.train()
