"""Segments of a chain of blocks: of each the input of its first block alone is kept.

    x0 -> [b0 b1] -> x2 -> [b2 b3] -> x4 -> [b4 b5] -> x6      kept: x0, x2, and all of the last segment
    backward         x2 -> b2 b3 again          '- its backward comes first: computing it again would save nothing

n blocks in k segments hold k inputs and n / k blocks: least, of the order of sqrt(n), at k = sqrt(n) (Chen et al. 2016,
arXiv:1604.06174, section 4.2).

The model calls its blocks one after the other, and goes on doing so: the call of a segment's first block runs all of
it, and the calls of the others, which must come with just what the one before returned, hand that on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError, Problem
from lockstep.transforms.block_state import Guard
from lockstep.transforms.recomputing import Recompute, replace_forward

_KEY = "memory.activation_checkpointing.mode"


def split_into_segments(names: Sequence[str], segments: int) -> list[list[str]]:
    """As even as can be, longer ones first; names of blocks, in their order.

    Raises:
        ConfigError: there are fewer blocks.
    """
    if len(names) < segments:
        message = f"{segments} segments of {len(names)} blocks; there can be {len(names)} at most"
        raise ConfigError(Problem("", "memory.activation_checkpointing.segments", message))
    size, longer = divmod(len(names), segments)
    ends = [0]
    for segment in range(segments):
        ends.append(ends[-1] + size + (segment < longer))
    return [list(names[start:end]) for start, end in pairwise(ends)]


def run_in_segments(model: nn.Module, segments: Sequence[Sequence[str]], recompute: Recompute) -> None:
    """Replaces the forwards of the blocks of `segments`, all but those of the last.

    Raises:
        ConfigError: in a forward: the blocks are no chain.
    """
    chains = [_Segment([(name, model.get_submodule(name)) for name in names], recompute) for names in segments[:-1]]
    cast("Any", model).forward = partial(_whole, model.forward, chains)


class _Segment:
    """Blocks that are computed in one call, the first one's."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], recompute: Recompute) -> None:
        self._names = [name for name, _ in blocks]
        self._forwards = [block.forward for _, block in blocks]
        self._recompute = recompute
        self._guard = Guard(dict(blocks))
        self._forget()
        for place, (_, block) in enumerate(blocks):
            replace_forward(block, partial(self._first if place == 0 else self._later, place))

    def left(self) -> list[str]:
        """Blocks that were computed, and that the model hasn't called; forgets them."""
        left = self._left
        self._forget()
        return left

    def _forget(self) -> None:
        self._left: list[str] = []
        self._found: Any = None  # what the last block has returned
        self._further: list[Any] = []  # what all blocks take besides

    def _first(self, place: int, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forwards[0](*inputs, **named)
        self._left = self._names[1:]
        self._found = self._recompute(self._guard, self._run, *inputs, **named)
        self._further = _further(inputs, named)
        return self._handed_on()

    def _later(self, place: int, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forwards[place](*inputs, **named)
        name, before = self._names[place], self._names[place - 1]
        if self._left[:1] != [name]:
            raise _no_chain(f"{name} is not called right after {before}")
        given = inputs[0] if inputs else next(iter(named.values()), None)
        if given is not _hidden(self._found, name) or not _same(_further(inputs, named), self._further):
            raise _no_chain(f"{name} takes something else than what {before} took and returned")
        self._left = self._left[1:]
        return self._handed_on()

    def _handed_on(self) -> Any:
        found = self._found
        if not self._left:
            self._forget()
        return found

    def _run(self, *inputs: Any, **named: Any) -> Any:
        found: Any = None
        for name, forward in zip(self._names, self._forwards, strict=True):
            if name != self._names[0]:
                hidden = _hidden(found, name)
                inputs, named = ((hidden, *inputs[1:]), named) if inputs else ((), {**named, next(iter(named)): hidden})
            found = forward(*inputs, **named)
        _hidden(found, self._names[-1])
        return found


def _hidden(found: Any, name: str) -> Tensor:
    """What one block hands to the next."""
    first, others = (found[0], found[1:]) if isinstance(found, tuple) and found else (found, ())
    if not isinstance(first, Tensor) or any(isinstance(one, Tensor) for one in tree_leaves(others)):
        raise _no_chain(f"blocks return more than one tensor (seen at {name})")
    return first


def _further(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """All but the first."""
    return tree_leaves((inputs[1:], named) if inputs else list(named.values())[1:])


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other or (not isinstance(one, Tensor) and type(one) is type(other) and bool(one == other))
        for one, other in zip(some, others, strict=True)
    )


def _whole(forward: Callable[..., Any], chains: Sequence[_Segment], *inputs: Any, **named: Any) -> Any:
    found = forward(*inputs, **named)
    for chain in chains:
        if left := chain.left():
            raise _no_chain(f"{left[0]} was left out in a forward")
    return found


def _no_chain(why: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, f"{why}: segments need blocks that form one chain; take mode: full"))
