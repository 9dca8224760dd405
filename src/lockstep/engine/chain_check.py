"""A check that blocks form a chain: each is met once, in order, and stages hand on one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.engine.placeholders import RemoteStagePlaceholder, no_chain


class PassedThrough(NamedTuple):
    """The output of a block of another stage: its input."""

    value: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> PassedThrough:
        return cls(value, value._version if isinstance(value, Tensor) else 0)

    def is_unchanged(self, value: object) -> bool:
        """Return whether the next block takes just that, and nothing was done to it in place."""
        return value is self.value and (not isinstance(value, Tensor) or value._version == self.version)


def something_between(before: str, block: str) -> ConfigError:
    return no_chain(
        f"the model's forward computes something between {before} and {block}, which neither stage would know of (such "
        f"as h = h + block(h)); move it into the block, or split elsewhere by parallel.pipeline_parallel.split"
    )


class ChainCheck:
    """Checks in a dry run that blocks form a chain.

    Args:
        names: Of all blocks.
        firsts: Blocks that stages begin with, from the second stage on.
        returns: What blocks return, as `in_form` takes it.
        zeros: An activation at a stage boundary.
    """

    def __init__(
        self, names: Sequence[str], firsts: frozenset[int], returns: str | int, zeros: Tensor, mode: ForwardMode
    ) -> None:
        self._names = names
        self._firsts = firsts
        self._returns = returns
        self._zeros = zeros
        self._mode = mode
        self._met = -1
        self._passed = PassedThrough.of(None)

    def handle(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a block's call."""
        if index != self._met + 1:
            raise no_chain(
                f"{self._names[index]} is called twice or out of order: stages meet each block once, in order"
            )
        self._met, given = index, first_argument(args, kwargs)
        if index in self._firsts:
            self._refuse_more(index, given, [*args, *kwargs.values()][1:])
        if index == len(self._names) - 1:
            self._mode.refused_sides = frozenset(("before",))
        hands_on = index + 1 in self._firsts or index == len(self._names) - 1
        self._passed = PassedThrough.of(self._zeros.clone() if hands_on else given)
        return in_form(self._returns, self._passed.value)

    def end(self) -> None:
        """Raise ConfigError if a block was not met."""
        if self._met != len(self._names) - 1:
            raise no_chain(
                f"{self._names[self._met + 1]} is not met in a forward: stages meet each block once, in order"
            )

    def _refuse_more(self, index: int, given: object, others: list[Any]) -> None:
        """Raise ConfigError if a stage's first block takes more than what the one before has returned."""
        block, before = self._names[index], self._names[index - 1]
        if not self._passed.is_unchanged(given):
            raise something_between(before, block)
        for other in tree_leaves(others):
            if isinstance(other, RemoteStagePlaceholder):
                raise no_chain(f"{block} takes more than what {before} made: a tensor made with {other.weight}")


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a block's first argument."""
    return args[0] if args else next(iter(kwargs.values()))


def in_form(form: str | int, value: Any) -> Any:
    """Return a value as blocks return it: "tensor", or a tuple of `form` items whose first it is."""
    return value if isinstance(form, str) else (value, *(None for _ in range(form - 1)))
