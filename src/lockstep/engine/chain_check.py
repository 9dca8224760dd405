"""A check that blocks form a chain: each is called once, in order, and stages pass on one tensor."""

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
        """Return whether `value` is the same tensor, and was not written to."""
        return value is self.value and (not isinstance(value, Tensor) or value._version == self.version)


def something_between(before: str, block: str) -> ConfigError:
    """Return the error for a computation between the blocks of two stages."""
    return no_chain(
        f"the model's forward computes something between {before} and {block}, which neither stage would compute (such "
        "as h = h + block(h)); move it into the block, or split elsewhere by parallel.pipeline_parallel.split"
    )


class ChainCheck:
    """Checks in a dry run that blocks form a chain.

    Args:
        firsts: The first block of each stage, from the second stage on.
        forms: The form of what each block returns; see `in_form`.
        zeros: What each block returns, as an activation at a stage boundary.
    """

    def __init__(
        self,
        names: Sequence[str],
        firsts: frozenset[int],
        forms: Sequence[str | int],
        zeros: Sequence[Tensor],
        mode: ForwardMode,
    ) -> None:
        self._names = names
        self._firsts = firsts
        self._forms = forms
        self._zeros = zeros
        self._mode = mode
        self._last_called = -1
        self._passed = PassedThrough.of(None)

    def handle(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a block's call."""
        if index != self._last_called + 1:
            raise no_chain(
                f"{self._names[index]} is called twice or out of order: stages call each block once, in order"
            )
        self._last_called, given = index, first_argument(args, kwargs)
        if index in self._firsts:
            block, before = self._names[index], self._names[index - 1]
            if not self._passed.is_unchanged(given):
                raise something_between(before, block)
            for other in tree_leaves([*args, *kwargs.values()][1:]):
                if isinstance(other, RemoteStagePlaceholder):
                    raise no_chain(f"{block} takes more than the output of {before}: a tensor made with {other.weight}")
        is_last = index == len(self._names) - 1
        if is_last:
            self._mode.refused_sides = frozenset(("before",))
        ends_stage = is_last or index + 1 in self._firsts
        self._passed = PassedThrough.of(self._zeros[index].clone() if ends_stage else given)
        return in_form(self._forms[index], self._passed.value)

    def end(self) -> None:
        """Raise ConfigError if a block was not called."""
        if self._last_called != len(self._names) - 1:
            missing = self._names[self._last_called + 1]
            raise no_chain(f"{missing} is not called in a forward: stages call each block once, in order")


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a block's first argument."""
    return args[0] if args else next(iter(kwargs.values()))


def in_form(form: str | int, value: Any) -> Any:
    """Return a value in the form of a block's output: "tensor", or a tuple of `form` items that begins with it."""
    return value if isinstance(form, str) else (value, *(None for _ in range(form - 1)))
