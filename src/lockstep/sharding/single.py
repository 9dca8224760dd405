"""One process holds everything: the reference, which every other strategy must reproduce."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import GradientStep
from lockstep.distributed.shard_boxes import dtype_name
from lockstep.sharding.context import Builder, Sharding, ShardingContext, SquaredNorm
from lockstep.sharding.model_state import ModelState

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Optimizer
_NAMED = 5
_ENGINE: Any = torch.autograd.Variable
_GRAD, _IS_THERE = operator.attrgetter("grad"), partial(operator.is_not, None)


def run_backward(loss: Tensor, seed: Tensor) -> None:
    """Do what `loss.backward(seed)` does, without its 15 calls that check arguments: they take 40 us on a CPU."""
    _ENGINE._execution_engine.run_backward(
        (loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class LocalStep(GradientStep):
    """The step of a process that has all gradients; `module`: what a training forward calls, if it isn't the model."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm, module: nn.Module | None = None
    ) -> None:
        self.module = module or model
        self._model = model
        self._optimizer = optimizer
        self._parameters = trainable_parameters(model)
        self._squared_norm = squared_norm

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        run_backward(loss, seed)

    def parameters_without_gradient(self) -> list[str]:
        return without_gradient(self._model)

    def squared_norm(self) -> Tensor:
        return self._squared_norm(present_gradients(self._parameters))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return named_gradients(self._model)

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._optimizer.update(rate, divisor, keep)


def build(context: ShardingContext) -> Sharding:
    """Return the single process's sharding."""
    model = context.model
    optimizer = context.optimizer(model.named_parameters())
    state = ModelState(model, optimizer)
    return Sharding(LocalStep(model, optimizer, context.squared_norm), state)


BUILDER = Builder(build)


# --- shared by the strategies -------------------------------------------------------------------------------------


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters, each once, tied ones too."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def present_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that exist, in the parameters' order."""
    return list(filter(_IS_THERE, map(_GRAD, parameters)))


def named_gradients(model: nn.Module, scale: float = 1.0) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients that exist x `scale`, by the names of parameters."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad if scale == 1.0 else parameter.grad * scale


def without_gradient(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters that have no gradient."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]


def refuse_other_than_fp32(parameters: Iterable[tuple[str, nn.Parameter]], key: str, does: str) -> None:
    """Raise ConfigError if a parameter isn't fp32; `does` completes the sentence ("fsdp keeps parameters")."""
    for name, parameter in parameters:
        if parameter.dtype != torch.float32:
            remedy = "convert the model with .float()" if parameter.is_floating_point() else "make it a buffer"
            why = f"{does} in fp32, and {name} is {dtype_name(parameter.dtype)}; {remedy}"
            raise ConfigError(Problem("", key, why))


def unused_parameters(names: Sequence[str], *, where: str = "", remedy: str = "") -> ConfigError:
    """Return the error for trained parameters that no gradient reaches.

    Args:
        where: Rank and micro-batch, as text; empty: anywhere in the first update.
        remedy: What has to change before a sample may leave a parameter out (`ShardingContext.unused_remedy`).
    """
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    it = "it" if len(names) == 1 else "them"
    message = (
        f"{shown}: no gradient reaches {it}{where and f' {where}'}. Freeze what isn't trained "
        f"(model.freeze: {json.dumps(list(names))}), or, if other batches do use {it}, "
        f"{remedy}set parallel.ddp.find_unused_parameters: true"
    )
    return ConfigError(Problem("", "model", message))
