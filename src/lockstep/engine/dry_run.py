"""Dry runs: forwards that check a model before training, and don't change modules or generators.

Dropout is left out: random differences mean nothing.
"""

from __future__ import annotations

import dis
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lockstep.core.records import Batch
from lockstep.distributed.generators import replayed_draws

_OF_TORCH = {*vars(nn.Module()), "forward", "_call_impl"} - {"training"}
_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


@contextmanager
def dry_run(model: nn.Module, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore the model and the generators at the block's end, and leave torch.nn.functional's dropout out in it.

    Yields a function that returns whether numbers were drawn nevertheless.
    """
    with unchanged(model), replayed_draws(device) as drawn, _no_dropout(), _full_precision():
        yield drawn


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Drop what torch logs of an operator that fails on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the modes, buffers, attributes and children of the model's modules, and the contents of containers."""
    before = [(each, _attributes(each), dict(each._buffers), dict(each._modules)) for each in model.modules()]
    values = [value for _, *kept, _ in before for of_module in kept for value in of_module.values()]
    copies = [(value, _copied(value)) for value in {id(value): value for value in values}.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, attributes, buffers, children in before:
                for name in _attributes(module).keys() - attributes.keys():
                    del module.__dict__[name]
                module.__dict__.update(attributes)
                module._buffers.update(buffers)
                module._modules.update(children)
            for value, content in copies:
                if content is not None:
                    _put_back(value, content)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _copied(value: Any) -> Any:
    """Return a copy of its content; None: the content can't change, or its type isn't known."""
    if type(value) is Tensor:  # no subclass, and not expanded: no forward can write to an expanded one
        expanded = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
        return None if expanded else value.detach().clone()
    return copy(value) if type(value) in (list, dict, set, deque) else None


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        value.data.copy_(before)  # a graph that has saved it takes it for unchanged, which it is again
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(before)
    else:
        value.extend(before)


@contextmanager
def _no_dropout() -> Iterator[None]:
    """Replace torch's functions; a `TorchFunctionMode` isn't active while blocks are computed again (torch 2.13)."""
    usual = {name: getattr(F, name) for name in _DROPS}
    for name in _DROPS:
        setattr(F, name, _unchanged_input)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(F, name, function)


def _unchanged_input(input: Tensor, *_unused: object, **_further: object) -> Tensor:  # noqa: A002
    return input


@contextmanager
def _full_precision() -> Iterator[None]:
    """Compute products of fp32 matrices on GPUs without rounding to TF32, so that small differences show."""
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
    """Yield a mapping that collects modules' last outputs by name, in the order of their ends."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs.pop(name, None)
            outputs[name] = first.detach()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        yield outputs


@contextmanager
def entered_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules that a forward is in, from outside in; after an error, those that it was in."""
    inside: list[str] = []

    def enter(name: str, module: nn.Module, inputs: object) -> None:
        inside.append(name)

    def leave(module: nn.Module, inputs: object, outputs: object) -> None:
        inside.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), prepend=True))
            hooks.enter_context(module.register_forward_hook(leave))
        yield inside


def first_line(error: Exception) -> str:
    """Return the error's class and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def raises_itself(error: BaseException) -> bool:
    """Return whether code of a model raised the error by a statement, as opposed to an operation that failed in it."""
    steps = [step for step in _steps(error.__traceback__) if step.tb_lasti >= 0]
    if not steps:
        return False
    last = steps[-1]
    at = last.tb_frame.f_code.co_code[last.tb_lasti]
    return _package(last) not in ("torch", "lockstep") and dis.opname[at] == "RAISE_VARARGS"


class Failed(NamedTuple):
    """The class of an error, and the line of the model's code that it comes from."""

    kind: type[BaseException]
    file: str
    line: int


def failed(error: BaseException) -> Failed | None:
    """Return where a model's code failed; None: it isn't on the way to the error."""
    own = [step for step in _steps(error.__traceback__) if _package(step) not in ("torch", "lockstep")]
    return Failed(type(error), own[-1].tb_frame.f_code.co_filename, own[-1].tb_lineno) if own else None


def _package(step: TracebackType) -> str:
    return str(step.tb_frame.f_globals.get("__name__")).partition(".")[0]


def _steps(step: TracebackType | None) -> Iterator[TracebackType]:
    while step is not None:
        yield step
        step = step.tb_next


def first_positions(batch: Batch, length: int, most: int) -> Batch:
    """Return the same samples with the first `most` positions of their sequences, which have `length`."""
    first = lambda value: value[:, :most] if is_by_position(value, length) else value  # noqa: E731
    return replace(batch, inputs=tree_map(first, batch.inputs), targets=tree_map(first, batch.targets))


def is_by_position(value: object, length: int) -> bool:
    """Return whether it is a tensor [samples, positions, ...]."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
