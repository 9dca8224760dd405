"""A forward that is made to be looked at, before anything is trained: nothing comes of it.

modes, buffers, attributes, generators     as they were before, whatever the forward does to them
dropout                                    left out: what it draws says nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lockstep.core.records import Batch
from lockstep.distributed.generators import replayed_draws

_OF_TORCH = {*vars(nn.Module()), "forward", "_call_impl"} - {"training"}
_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


@contextmanager
def rehearsal(model: nn.Module, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Afterwards the model and the generators are what they were. Inside nothing is dropped by torch.nn.functional;
    gives what says whether numbers were drawn nevertheless."""
    with unchanged(model), replayed_draws(device) as drawn, _nothing_dropped(), _in_full_precision():
        yield drawn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards its modules have the modes, buffers and attributes that they had; what these hold in turn is another
    matter, but for plain containers."""
    before = [(module, dict(_attributes(module)), dict(module._buffers)) for module in model.modules()]
    held = [one for _, *kept in before for of in kept for one in of.values()]
    copies = [(one, _copied(one)) for one in {id(one): one for one in held}.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, attributes, buffers in before:
                for name in _attributes(module).keys() - attributes.keys():
                    del module.__dict__[name]
                module.__dict__.update(attributes)
                module._buffers.update(buffers)
            for one, content in copies:
                if content is not None:
                    _put_back(one, content)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What user code keeps in a module, and its mode."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _copied(value: Any) -> Any:
    """What it holds now; None: it can't come to hold something else, or nobody knows."""
    if type(value) is Tensor:  # nothing that stands in for one, or is expanded: nobody can write to that
        expanded = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
        return None if expanded else value.detach().clone()
    return copy(value) if type(value) in (list, dict, set, deque) else None


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        value.detach().copy_(before)
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(before)
    else:
        value.extend(before)


@contextmanager
def _nothing_dropped() -> Iterator[None]:
    """A mode of torch's functions would do it, were it there when a backward computes blocks again (torch 2.13)."""
    usual = {name: getattr(F, name) for name in _DROPS}
    for name in _DROPS:
        setattr(F, name, _kept)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(F, name, function)


def _kept(input: Tensor, *_unused: object, **_further: object) -> Tensor:  # noqa: A002
    return input


@contextmanager
def _in_full_precision() -> Iterator[None]:
    """Products of fp32 matrices on GPUs, whose factors may be rounded to TF32: small differences are to show."""
    if not torch.cuda.is_available():
        yield
        return
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def outputs_of_modules(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """By name, in the order in which they are done; of a module that is called more than once, the last."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if isinstance(first, Tensor) and first.is_floating_point():
            found.pop(name, None)
            found[name] = first.detach()

    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def entered_modules(model: nn.Module) -> Iterator[list[str]]:
    """Gives the names of the modules that a forward is in, from outside in; after an error those around it."""
    inside: list[str] = []

    def enter(name: str, module: nn.Module, inputs: object) -> None:
        inside.append(name)

    def leave(module: nn.Module, inputs: object, outputs: object) -> None:
        inside.pop()

    modules = list(model.named_modules())
    hooks = [module.register_forward_pre_hook(partial(enter, name), prepend=True) for name, module in modules]
    hooks += [module.register_forward_hook(leave) for _, module in modules]
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


def first_line(error: Exception) -> str:
    """The error's class and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def beginning(batch: Batch, length: int, most: int) -> Batch:
    """The first positions of the same samples.

    Args:
        length: of the sequences.
    """
    cut = lambda value: value[:, :most] if is_by_position(value, length) else value  # noqa: E731
    return replace(batch, inputs=tree_map(cut, batch.inputs), targets=tree_map(cut, batch.targets))


def is_by_position(value: object, length: int) -> bool:
    """Whether it is a tensor [samples, positions, ...]."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
