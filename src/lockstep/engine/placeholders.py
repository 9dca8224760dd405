"""Modules around the blocks of a model, and placeholders for other ranks' modules.

    embedding        before    the first stage's; also the last one's, if tied to a weight after the blocks
    norm, head       after     the last stage's

The side of a module follows from where it is used or, if that isn't known, defined. Results computed from weights of
another stage are `RemoteStagePlaceholder`s, and a stage that would use one raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.forward_mode import ForwardMode, Side


class OuterModule(NamedTuple):
    """A module that is in no block, with its own parameters and buffers."""

    name: str
    module: nn.Module
    side: Side


class RemoteStagePlaceholder(Tensor):
    """Replaces weights that another stage holds, without memory, and tensors that are computed with them.

    Attributes:
        side: The side of the weights; None: they are tied, and belong to both.
        weight: The name of the weights.
        is_computed: Whether it replaces a tensor that is computed with them.
        forward_mode: Holds the sides that may not be used now.
    """

    side: Side | None = None
    weight = ""
    is_computed = False
    forward_mode = ForwardMode()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        compute: Any = super().__torch_function__
        if reads_metadata(function):
            return compute(function, types, args, kwargs or {})
        used = [item for item in tree_leaves((args, kwargs)) if isinstance(item, RemoteStagePlaceholder)]
        for placeholder in used:
            if placeholder.side in placeholder.forward_mode.refused_sides:
                raise no_chain(_used_on_the_other_side(placeholder))
        result = compute(function, types, args, kwargs or {})
        for output in tree_leaves(result):
            if isinstance(output, RemoteStagePlaceholder) and used:
                source = used[0]
                output.side, output.weight, output.is_computed = source.side, source.weight, True
                output.forward_mode = source.forward_mode
        return result


def _used_on_the_other_side(placeholder: RemoteStagePlaceholder) -> str:
    name = placeholder.weight
    if placeholder.side == "after":
        return (
            f"{name} belongs after the blocks, and is used before the last block is called; if the forward leaves "
            "blocks out, have it call each"
        )
    if placeholder.is_computed:
        return (
            f"a result of {name} before the blocks, or from the output of an earlier block, is used "
            "after the last block, where no stage has it"
        )
    return f"{name} is used before the blocks and after them, on two stages; use two modules, tied to each other"


def reads_metadata(function: Any) -> bool:
    """Return whether a torch function reads only shape, dtype or device."""
    return getattr(function, "__name__", "") in ("__get__", "size", "dim", "__repr__", "is_floating_point", "detach")


def placeholder(
    weight: Tensor, device: torch.device, name: str, side: Side | None, mode: ForwardMode
) -> RemoteStagePlaceholder:
    """Return the placeholder of a weight."""
    zero = torch.zeros((), dtype=weight.dtype, device=device)
    made = zero.expand(weight.shape).as_subclass(RemoteStagePlaceholder)
    made.weight, made.side, made.forward_mode = name, side, mode
    return made


@contextmanager
def shadowed(tensors: Iterable[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Have modules use these tensors instead of their own while the block runs."""
    slots = list(tensors)
    for module, key, tensor in slots:
        module.__dict__[key] = tensor
    try:
        yield
    finally:
        for module, key, _ in slots:
            del module.__dict__[key]


def outer_modules(model: nn.Module, blocks: Sequence[str], used: Mapping[str, Side]) -> list[OuterModule]:
    """Return the modules that are not in blocks; `used` has a parameter's side, if it is known."""
    outer: list[OuterModule] = []
    defined: Side = "before"
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if f"{name}.".startswith(inside):
            defined = "after"
            continue
        names = (f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False))
        sides = {used.get(own, defined) for own in names}
        outer.append(OuterModule(name, module, sides.pop() if len(sides) == 1 else defined))
    return outer


def tied_over_sides(model: nn.Module, outer: Sequence[OuterModule]) -> list[str]:
    """Return the names of the parameters that modules on both sides share."""
    before, after = (
        {id(item) for _, module, side in outer if side == wanted for item in module.parameters(recurse=False)}
        for wanted in ("before", "after")
    )
    return [name for name, item in model.named_parameters() if id(item) in before & after]


def refuse_tied_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ConfigError if a block shares a parameter with another block, or with a module outside of blocks."""
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        first, first_owner = owners.setdefault(id(parameter), (name, owner))
        if owner != first_owner:
            raise no_chain(f"{name} is tied to {first}, and weights of a block can't be shared by stages")


def remove_sides(outer: Sequence[OuterModule], kept: set[Side], device: torch.device, mode: ForwardMode) -> None:
    """Replace the weights of sides that aren't `kept` by placeholders, and leave their buffers out of the state."""
    used = {id(item) for _, module, side in outer if side in kept for item in module.parameters(recurse=False)}
    for name, module, side in outer:
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in used:  # a tied one stays, under all its names
                del module._parameters[key]
                module.__dict__[key] = placeholder(parameter, device, f"{name}.{key}".lstrip("."), side, mode)
        if side not in kept:
            module._non_persistent_buffers_set.update(module._buffers)


def no_chain(why: str) -> ConfigError:
    """Return the error for a model that can't be partitioned into stages."""
    return ConfigError(Problem("", "parallel.pipeline", f"{why}; take another strategy, such as fsdp"))
