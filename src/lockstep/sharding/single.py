"""One process holds everything: the reference, which every other strategy must reproduce."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.errors import ConfigError, Problem, RunFailed
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
    if context.config.optim.in_backward:
        return Sharding(StepInBackward(model, optimizer, context.squared_norm), state, updates_in_backward=True)
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


class StepInBackward(GradientStep):
    """Updates each parameter as soon as its gradient exists: no two gradients exist at once.

    So there is no clipping by the global norm, accumulation, reduction over ranks, or discarding. A gradient that isn't
    finite is applied before it is seen, and ends the run.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm) -> None:
        self.module = model
        self._optimizer = optimizer  # of all parameters, called while one of them has a gradient
        self._squared_norm = squared_norm
        self._rate = 0.0
        self._squares: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def begin_update(self, samples: int, rate: Callable[[], float]) -> None:
        self._rate = rate()
        self._squares = {}

    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook comes after the gradient"
        self._squares[parameter] = self._squared_norm([parameter.grad])
        self._optimizer.update(self._rate, 1.0, True)

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        run_backward(loss, seed)

    def parameters_without_gradient(self) -> list[str]:
        trained = ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)
        return [name for name, parameter in trained if parameter not in self._squares]

    def squared_norm(self) -> Tensor:
        squares = list(self._squares.values())
        return torch.stack(squares).sum() if squares else self._squared_norm([])

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())  # they are freed

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Do nothing, since the backward has updated; raise RunFailed if the update should have been discarded."""
        if not bool(keep):  # on a GPU the host waits to learn it
            raise RunFailed(
                "a gradient is not finite, and under optim.in_backward it has been applied: the parameters are "
                "corrupt. Resume from the last checkpoint with optim.in_backward: false, which discards such updates"
            )
