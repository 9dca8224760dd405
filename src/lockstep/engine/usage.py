"""The side of a model's blocks that uses its other weights, whatever the order of definition.

Found in a forward with stand-ins for all weights, where one block of each kind replaces the others of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.adapters import quantized_of
from lockstep.engine.chain_check import first_argument
from lockstep.engine.dry_run import Failed, failed, is_by_position, unchanged
from lockstep.engine.eager import call
from lockstep.engine.placeholders import reads_metadata, shadowed

if TYPE_CHECKING:
    from lockstep.core.records import Inputs
    from lockstep.distributed.forward_mode import Side

_TOKENS = 8


class Use(NamedTuple):
    """The result of a forward of the whole model.

    Attributes:
        sides: The side that uses each parameter; empty if the forward failed.
        given: The first block's first argument.
        outputs: What each block returns, by its index; some are missing if the forward failed.
        failed: Where it failed by itself; None: it didn't.
    """

    sides: dict[str, Side]
    given: Any
    outputs: dict[int, Any]
    failed: Failed | None = None


@torch.no_grad()
def sides_of_use(model: nn.Module, blocks: Sequence[str], inputs: Inputs) -> Use:
    """Return the side that uses each parameter, without those used on both or not in this forward.

    Args:
        model: On the CPU, perhaps without values; whole.
        inputs: Inputs of a few samples, on the CPU.
    """
    modules: list[Any] = [model.get_submodule(name) for name in blocks]
    tracker = _UseTracker([_kind(module) for module in modules])
    for index, module in enumerate(modules):
        module._call_impl = partial(tracker.block, index, module._call_impl)
    try:
        with torch.random.fork_rng([]), unchanged(model), shadowed(_stand_ins(model, tracker)):
            model.eval()
            call(model, _few_tokens(inputs))
    except Exception as error:
        return Use({}, tracker.given, tracker.outputs, failed(error))
    finally:
        for module in modules:
            del module._call_impl
    items = tracker.used.items()
    used = {name: side for name, sides in items for side in sides if len(sides) == 1 and side is not None}
    return Use(used, tracker.given, tracker.outputs)


def _kind(module: nn.Module) -> Hashable:
    """Return what is equal for blocks that compute alike: class, and names and shapes of tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return type(module), tuple((name, tensor.shape) for name, tensor in tensors)


def _few_tokens(inputs: Inputs) -> Inputs:
    """Return the first tokens of each text, if inputs are texts, to save time."""
    lengths = [
        tensor.shape[1]
        for tensor in tree_leaves(inputs)
        if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.dtype == torch.int64
    ]
    first = lambda tensor: tensor[:, :_TOKENS] if is_by_position(tensor, lengths[0]) else tensor  # noqa: E731
    return cast("Inputs", tree_map(first, inputs)) if lengths else inputs


class _UseTracker:
    """Tracks which side of the blocks a forward is on (None: between them), and which parameters it uses there."""

    def __init__(self, kinds: Sequence[Hashable]) -> None:
        self._kinds = kinds
        self._side: Side | None = "before"
        self._computed: dict[Hashable, Any] = {}
        self.used: dict[str, set[Side | None]] = {}
        self.given: Any = None
        self.outputs: dict[int, Any] = {}

    def use(self, name: str) -> None:
        self.used.setdefault(name, set()).add(self._side)

    def block(self, index: int, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace a block's call."""
        self._side = None
        if index == 0:
            self.given = first_argument(args, kwargs)
        forms = (item.shape if isinstance(item, Tensor) else type(item) for item in tree_leaves((args, kwargs)))
        kind = (self._kinds[index], *forms)
        if kind not in self._computed:
            self._computed[kind] = compute(*args, **kwargs)
        if index == len(self._kinds) - 1:
            self._side = "after"
        self.outputs[index] = self._computed[kind]
        return self.outputs[index]


class _TrackedZeros(Tensor):
    """Replaces weights, without memory, and reports when something is computed with them."""

    use: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if not reads_metadata(function):
            for tensor in tree_leaves(given):
                if isinstance(tensor, _TrackedZeros):
                    tensor.use()
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(_untracked, given)
            return function(*args, **kwargs)


def _untracked(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _TrackedZeros) else value


def _stand_ins(model: nn.Module, tracker: _UseTracker) -> Iterator[tuple[nn.Module, str, Tensor]]:
    quantized = quantized_of(model)  # their layers would keep the stand-ins
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield module, key, torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
        for key, tensor in module._parameters.items():
            name = f"{prefix}.{key}".lstrip(".")
            if tensor is not None and name not in quantized:
                tracked: Any = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape).as_subclass(_TrackedZeros)
                tracked.use = partial(tracker.use, name)
                yield module, key, tracked
