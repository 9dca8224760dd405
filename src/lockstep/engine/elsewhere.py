"""What lies around the blocks of a model, and what takes its place on a rank that doesn't have it.

    embedding        before    the first stage's; what is tied to something after the blocks is the last one's, too
    blocks.0 ...
    norm, head       after     the last stage's

On which side a module lies is told by where it is defined. That it is also used there is seen in the forward: what is
computed from weights that lie elsewhere is an `Elsewhere`, and a stage that would make use of it says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.core.errors import ConfigError, Problem

Side = Literal["before", "after"]


class Elsewhere(Tensor):
    """Takes the place of weights that another stage has, and of what is computed with them. It takes no memory as
    long as it stands for weights.

    Attributes:
        usable: before a stage's first block.
    """

    usable = True

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not cls.usable and not _only_looks(function):
            raise no_chain(
                "this stage uses weights that another stage has: a model is cut where its blocks form one chain; what "
                "is defined before them is to be used before them alone, and what is defined after them after them"
            )
        compute: Any = super().__torch_function__
        return compute(function, types, args, kwargs or {})


def _only_looks(function: Any) -> bool:
    """At shape, device and the like."""
    return getattr(function, "__name__", "") in ("__get__", "size", "dim", "__repr__", "is_floating_point", "detach")


def stand_in(weight: Tensor, device: torch.device) -> Elsewhere:
    zero = torch.zeros((), dtype=weight.dtype, device=device)
    return zero.expand(weight.shape).as_subclass(Elsewhere)


def outside(model: nn.Module, blocks: Sequence[str]) -> list[tuple[nn.Module, Side]]:
    """The modules that are not in blocks, each with what it holds itself."""
    found: list[tuple[nn.Module, Side]] = []
    side: Side = "before"
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if f"{name}.".startswith(inside):
            side = "after"
        else:
            found.append((module, side))
    return found


def tied_across(model: nn.Module, around: Sequence[tuple[nn.Module, Side]]) -> list[str]:
    """Names of the parameters that modules on both sides share."""
    before, after = (
        {id(one) for module, side in around if side == wanted for one in module.parameters(recurse=False)}
        for wanted in ("before", "after")
    )
    return [name for name, one in model.named_parameters() if id(one) in before & after]


def refuse_tied_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raises ConfigError: a block shares a parameter with another one, or with what lies around them."""
    places: dict[int, tuple[str, str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        place = next((block for block in blocks if name.startswith(f"{block}.")), "")
        first, first_place = places.setdefault(id(one), (name, place))
        if place != first_place:
            raise no_chain(f"{name} is tied to {first}, and weights of a block can't be shared by stages")


def leave(around: Sequence[tuple[nn.Module, Side]], kept: set[str], device: torch.device) -> None:
    """Gives up what belongs to other sides than the `kept` ones: weights, and that buffers are state."""
    used = {id(one) for module, side in around if side in kept for one in module.parameters(recurse=False)}
    for module, side in around:
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in used:  # a tied one stays, under all its names
                del module._parameters[key]
                module.__dict__[key] = stand_in(parameter, device)
        if side not in kept:
            module._non_persistent_buffers_set.update(module._buffers)


def no_chain(why: str) -> ConfigError:
    return ConfigError(Problem("", "parallel.pipeline", f"{why}; take another strategy, such as fsdp"))
