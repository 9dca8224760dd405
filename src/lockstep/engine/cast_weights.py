"""The parameters that a forward under autocast only uses in autocast's precision, so that they may be gathered in it.

    linear.weight       cast to bf16 -> product                              gathered in bf16: bitwise identical
    embedding.weight    used in fp32: it sets the residual stream's dtype    stays fp32
    tied weight         used in fp32, and cast for the head                  stays fp32

A forward on fake tensors shows it. Where that fails (a model that reads values), the class of the module decides.
Experts of the transformers library stay fp32: autocast doesn't know their grouped product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.engine.dry_run import quiet_fakes, unchanged
from lockstep.engine.eager import call
from lockstep.engine.placeholders import shadowed

if TYPE_CHECKING:
    from lockstep.core.records import Inputs

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""torch's modules that use all of their parameters in a product that autocast lowers."""


@torch.no_grad()
def cast_weights(
    model: nn.Module,
    inputs: Inputs,
    dtype: torch.dtype,
    device: torch.device,
    muted: Callable[[], AbstractContextManager[object]],
) -> frozenset[str]:
    """Return the names of the parameters that autocast casts to `dtype` wherever a forward uses them.

    Args:
        model: Whole, perhaps without values; it isn't changed.
        inputs: Inputs of a few samples, on the CPU; `device` is the run's, which decides what autocast does.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    watch = _Watch(dtype)
    mode: Any = detect_fake_mode([*model.parameters(), *model.buffers(), *tree_leaves(inputs)])
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, muted(), quiet_fakes(), torch.random.fork_rng([]), unchanged(model):
            stand_ins = list(_stand_ins(model, device, names, watch))
            given = tree_map(lambda value: _fake(value, device) if isinstance(value, Tensor) else value, inputs)
            autocast = torch.autocast(device.type, dtype=dtype, cache_enabled=False)
            with shadowed(stand_ins), watch, autocast:
                call(model, given, hooks=False)
    except Exception:  # a model may read values, which fake tensors don't have
        watch.cast = set()
    return frozenset((watch.cast | _cast_by_class(model, names)) - watch.kept)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches which parameters are only `cast` to the lower precision, and which ones are used otherwise (`kept`)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cast: set[str] = set()
        self.kept: set[str] = set()
        self._dtype = dtype
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Watch a parameter's memory, which its views share."""
        self._names[tensor.untyped_storage()._cdata] = name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        used = {name for value in inputs if (name := self._name_of(value)) is not None}
        if not used or not isinstance(output, Tensor) or self._name_of(output) is not None:
            return output  # a question about the tensor, or a view
        lowered = function is torch.ops.aten._to_copy.default and output.dtype is self._dtype
        (self.cast if lowered else self.kept).update(used)
        return output

    def _name_of(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata)


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _stand_ins(
    model: nn.Module, device: torch.device, names: dict[int, str], watch: _Watch
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield fake tensors for parameters and buffers, the same one wherever a tensor is shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in made:
                fake = _fake(tensor, device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                if id(tensor) in names:
                    watch.add(names[id(tensor)], made[id(tensor)])
            yield module, key, made[id(tensor)]


def _cast_by_class(model: nn.Module, names: dict[int, str]) -> set[str]:
    """Return the names of the parameters that only products use, as far as classes show."""
    in_products: set[int] = set()
    elsewhere: set[int] = set()
    for module in model.modules():
        own = in_products if _is_product(module) else elsewhere
        own.update(map(id, module.parameters(recurse=False)))
    return {names[key] for key in in_products - elsewhere}


def _is_product(module: nn.Module) -> bool:
    forward = type(module).forward
    return any(forward is product.forward for product in _PRODUCTS)
