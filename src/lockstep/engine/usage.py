"""On which side of a model's blocks its other weights are used, whatever the order in which they are defined.

    defined    embedding, norm, blocks.0, blocks.1, head
    used       embedding | blocks.0, blocks.1 | norm, head

Seen in a forward with stand-ins for all weights, which computes as little as it can: of the blocks the first alone, on
zeros, in place of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.engine.eager import call
from lockstep.engine.elsewhere import Side, in_place_of, only_looks
from lockstep.engine.rehearsing import is_by_position, unchanged

if TYPE_CHECKING:
    from lockstep.core.records import Inputs

_TOKENS = 8


@torch.no_grad()
def sides_of_use(model: nn.Module, blocks: Sequence[str], inputs: Inputs) -> dict[str, Side]:
    """By the names of parameters. Nothing is said of those that are used on both sides, or not in this forward; nor of
    any, if the forward doesn't work so.

    Args:
        model: on the CPU, perhaps without values; whole.
        inputs: of a few samples, on the CPU.
    """
    met = _Met(len(blocks))
    try:
        with (
            torch.random.fork_rng([]),
            unchanged(model),
            in_place_of(_stand_ins(model, met)),
            _first_for_all(model, blocks, met),
        ):
            model.eval()
            call(model, _few_tokens(inputs))
    except Exception:  # whatever a forward makes of zeros
        return {}
    return {name: side for name, sides in met.used.items() for side in sides if len(sides) == 1 and side is not None}


def _few_tokens(inputs: Inputs) -> Inputs:
    """The first of each text, if there are any: a block computes on them."""
    lengths = [one.shape[1] for one in tree_leaves(inputs) if isinstance(one, Tensor) and _are_tokens(one)]
    cut = lambda one: one[:, :_TOKENS] if is_by_position(one, lengths[0]) else one  # noqa: E731
    return cast("Inputs", tree_map(cut, inputs)) if lengths else inputs


def _are_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype == torch.int64


class _Met:
    """Where a forward is.

    Attributes:
        used: on which sides each parameter was; None: between blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._side: Side | None = "before"
        self._first: Any = None
        self.used: dict[str, set[Side | None]] = {}

    def use(self, name: str) -> None:
        self.used.setdefault(name, set()).add(self._side)

    def block(self, index: int, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a block's call."""
        self._side = None
        if index == 0:
            self._first = compute(*args, **kwargs)
        if index == self._blocks - 1:
            self._side = "after"
        return self._first


class _Noted(Tensor):
    """Stands for weights, and says when something is computed with them. It takes no memory."""

    use: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if not only_looks(function):
            for one in tree_leaves(given):
                if isinstance(one, _Noted):
                    one.use()
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(_plain, given)
            return function(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _Noted) else value


def _stand_ins(model: nn.Module, met: _Met) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Zeros, for parameters, and for buffers without values."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield module, key, torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
        for key, one in module._parameters.items():
            if one is not None:
                noted: Any = torch.zeros((), dtype=one.dtype).expand(one.shape).as_subclass(_Noted)
                noted.use = partial(met.use, f"{prefix}.{key}".lstrip("."))
                yield module, key, noted


@contextmanager
def _first_for_all(model: nn.Module, blocks: Sequence[str], met: _Met) -> Iterator[None]:
    modules: list[Any] = [model.get_submodule(name) for name in blocks]
    for index, module in enumerate(modules):
        module._call_impl = partial(met.block, index, module._call_impl)
    try:
        yield
    finally:
        for module in modules:
            del module._call_impl
