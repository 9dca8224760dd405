"""Segments of a chain of blocks, of which only the input of the first block is kept.

    x0 -> [b0 b1] -> x2 -> [b2 b3] -> x4 -> [b4 b5] -> x6      kept: x0, x2, and all of the last segment
    backward         x2 -> b2 b3 again          '- its backward comes first: computing it again would save nothing

n blocks in k segments hold k inputs and n / k blocks: least, of the order of sqrt(n), at k = sqrt(n) (Chen et al. 2016,
arXiv:1604.06174, section 4.2).

The model still calls its blocks one after the other: the call of a segment's first block runs the whole segment, and
the calls of the others, whose input must be the output of the one before, return the result.
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
from lockstep.transforms.block_state import StateGuard
from lockstep.transforms.recomputing import Recompute, replace_forward

_KEY = "memory.activation_checkpointing.mode"


def split_into_segments(names: Sequence[str], segments: int) -> list[list[str]]:
    """Return the names of blocks in segments of about the same length, longer ones first.

    Raises:
        ConfigError: There are fewer blocks than segments.
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
    """Replace the forwards of the blocks of `segments`, all but those of the last.

    Raises:
        ConfigError: In a forward: the blocks are no chain.
    """
    chains = [_Segment([(name, model.get_submodule(name)) for name in names], recompute) for names in segments[:-1]]
    cast("Any", model).forward = partial(_checked, model.forward, chains)


class _Segment:
    """Blocks that are computed in the call of the first one."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], recompute: Recompute) -> None:
        self._names = [name for name, _ in blocks]
        self._forwards = [block.forward for _, block in blocks]
        self._recompute = recompute
        self._guard = StateGuard(dict(blocks))
        self._clear()
        for index, (_, block) in enumerate(blocks):
            replace_forward(block, partial(self._first if index == 0 else self._later, index))

    def left(self) -> list[str]:
        """Return the blocks that were computed and that the model hasn't called; clear the segment."""
        left = self._left
        self._clear()
        return left

    def _clear(self) -> None:
        self._left: list[str] = []
        self._output: Any = None  # the last block's
        self._further: list[Any] = []  # the further arguments of all blocks

    def _first(self, index: int, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forwards[0](*inputs, **named)
        self._left = self._names[1:]
        self._output = self._recompute(self._guard, self._run, *inputs, **named)
        self._further = _further(inputs, named)
        return self._result()

    def _later(self, index: int, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forwards[index](*inputs, **named)
        name, before = self._names[index], self._names[index - 1]
        if self._left[:1] != [name]:
            raise _no_chain(f"{name} is not called right after {before}")
        given = inputs[0] if inputs else next(iter(named.values()), None)
        if given is not _hidden(self._output, name) or not _same(_further(inputs, named), self._further):
            raise _no_chain(f"{name} takes something else than the output and the further inputs of {before}")
        self._left = self._left[1:]
        return self._result()

    def _result(self) -> Any:
        output = self._output
        if not self._left:
            self._clear()
        return output

    def _run(self, *inputs: Any, **named: Any) -> Any:
        output: Any = None
        for name, forward in zip(self._names, self._forwards, strict=True):
            if name != self._names[0]:
                hidden = _hidden(output, name)
                inputs, named = ((hidden, *inputs[1:]), named) if inputs else ((), {**named, next(iter(named)): hidden})
            output = forward(*inputs, **named)
        _hidden(output, self._names[-1])
        return output


def _hidden(output: Any, name: str) -> Tensor:
    """Return the tensor that one block passes to the next."""
    first, others = (output[0], output[1:]) if isinstance(output, tuple) and output else (output, ())
    if not isinstance(first, Tensor) or any(isinstance(value, Tensor) for value in tree_leaves(others)):
        raise _no_chain(f"blocks return more than one tensor (seen at {name})")
    return first


def _further(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    return tree_leaves((inputs[1:], named) if inputs else list(named.values())[1:])


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        value is other or (not isinstance(value, Tensor) and type(value) is type(other) and bool(value == other))
        for value, other in zip(some, others, strict=True)
    )


def _checked(forward: Callable[..., Any], chains: Sequence[_Segment], *inputs: Any, **named: Any) -> Any:
    output = forward(*inputs, **named)
    for chain in chains:
        if left := chain.left():
            raise _no_chain(f"{left[0]} was left out in a forward")
    return output


def _no_chain(why: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, f"{why}: segments need blocks that form one chain; set mode: full"))
