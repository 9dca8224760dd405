"""What lies around the blocks of a model, and what takes its place on a rank that doesn't have it.

    embedding        before    the first stage's; what is tied to something after the blocks is the last one's, too
    blocks.0 ...
    norm, head       after     the last stage's

On which side a module lies is told by where it is used, or, where that isn't known, by where it is defined. That it is
used there alone is seen in the forward: what is computed from weights that lie elsewhere is an `Elsewhere`, and a stage
that would make use of it says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError, Problem

Side = Literal["before", "after"]
EVERYWHERE: frozenset[Side | None] = frozenset(("before", "after", None))


class Around(NamedTuple):
    """A module that is in no block, with what it holds itself."""

    name: str
    module: nn.Module
    side: Side


class Elsewhere(Tensor):
    """Takes the place of weights that another stage has, and of what is computed with them. It takes no memory as
    long as it stands for weights.

    Attributes:
        side: of the weights; None: they are tied, and belong to both.
        of: their name.
        computed: it stands for what is computed with them.
        refused: sides whose weights may not be used now.
    """

    side: Side | None = None
    of = ""
    computed = False
    refused: frozenset[Side | None] = frozenset()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        compute: Any = super().__torch_function__
        if only_looks(function):
            return compute(function, types, args, kwargs or {})
        used = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Elsewhere)]
        for one in used:
            if one.side in Elsewhere.refused:
                raise no_chain(_used_on_the_other_side(one))
        found = compute(function, types, args, kwargs or {})
        for made in tree_leaves(found):
            if isinstance(made, Elsewhere) and used:
                made.side, made.of, made.computed = used[0].side, used[0].of, True
        return found


def _used_on_the_other_side(one: Elsewhere) -> str:
    if one.side == "after":
        return (
            f"{one.of} is of what comes after the blocks, and used before the last of them is met; if the forward "
            "leaves blocks out, have it meet each"
        )
    if one.computed:
        return (
            f"what the model computes with {one.of} before the blocks, or of what an earlier block gives, is used "
            "after the last of them, where no stage has it"
        )
    return (
        f"{one.of} is used before the blocks and after them, on two stages; two modules may have it, one on each side, "
        "tied to each other"
    )


def only_looks(function: Any) -> bool:
    """At shape, device and the like."""
    return getattr(function, "__name__", "") in ("__get__", "size", "dim", "__repr__", "is_floating_point", "detach")


def stand_in(weight: Tensor, device: torch.device, of: str, side: Side | None) -> Elsewhere:
    zero = torch.zeros((), dtype=weight.dtype, device=device)
    found = zero.expand(weight.shape).as_subclass(Elsewhere)
    found.of, found.side = of, side
    return found


@contextmanager
def in_place_of(stand_ins: Iterable[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """While it lasts, modules find these tensors under the names of their own."""
    shadowed = list(stand_ins)
    for module, key, tensor in shadowed:
        module.__dict__[key] = tensor
    try:
        yield
    finally:
        for module, key, _ in shadowed:
            del module.__dict__[key]


def outside(model: nn.Module, blocks: Sequence[str], used: Mapping[str, Side]) -> list[Around]:
    """The modules that are not in blocks.

    Args:
        used: the side on which a forward computes with a parameter.
    """
    found: list[Around] = []
    defined: Side = "before"
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if f"{name}.".startswith(inside):
            defined = "after"
            continue
        names = (f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False))
        sides = {used.get(one, defined) for one in names}
        found.append(Around(name, module, sides.pop() if len(sides) == 1 else defined))
    return found


def tied_across(model: nn.Module, around: Sequence[Around]) -> list[str]:
    """Names of the parameters that modules on both sides share."""
    before, after = (
        {id(one) for _, module, side in around if side == wanted for one in module.parameters(recurse=False)}
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


def leave(around: Sequence[Around], kept: set[str], device: torch.device) -> None:
    """Gives up what belongs to other sides than the `kept` ones: weights, and that buffers are state."""
    used = {id(one) for _, module, side in around if side in kept for one in module.parameters(recurse=False)}
    for name, module, side in around:
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in used:  # a tied one stays, under all its names
                del module._parameters[key]
                module.__dict__[key] = stand_in(parameter, device, f"{name}.{key}".lstrip("."), side)
        if side not in kept:
            module._non_persistent_buffers_set.update(module._buffers)


def no_chain(why: str) -> ConfigError:
    return ConfigError(Problem("", "parallel.pipeline", f"{why}; take another strategy, such as fsdp"))
