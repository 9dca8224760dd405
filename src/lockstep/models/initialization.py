"""Initial values keyed by name: the same under every strategy, on every device, in any order of construction.

Lockstep's models   each parameter       = rule(key(seed, "parameter", its name), its shape)
transformers        each module's reset  = its own code, run under key(seed, "module", its name)
custom              the constructor      = the user's code, run under key(seed, "construction"); never overwritten
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.core.keys import key
from lockstep.distributed.shard_boxes import copy_from_full

Rule = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor with initial values that are drawn from a generator."""


def normal(std: float) -> Rule:
    """Return the rule that draws from a normal distribution with mean 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def constant(value: float) -> Rule:
    """Return the rule that sets all elements to a value."""
    return lambda tensor, generator: tensor.fill_(value)


RuleOf = Callable[[str, Tensor], Rule]
"""Returns the rule of a parameter, given its name and the parameter, for its shape."""
Values = Callable[[Container[str]], Iterator[tuple[str, Tensor]]]
"""Yields the values of the named tensors, whole, on the CPU."""
_ASKS_FOR_MEMORY = cast("Any", Tensor).is_meta.__get__
"""Called first by `trunc_normal_`, `orthogonal_` and others, which then do nothing without memory."""


@torch.no_grad()
def initialize(module: nn.Module, seed: int, rule_of: RuleOf) -> None:
    """Fill every parameter by its rule; a tied one once, under its first name."""
    parameters = dict(module.named_parameters())
    for name, value in initial_values(module, seed, rule_of)(parameters):
        copy_from_full(parameters[name], value)


def initial_values(module: nn.Module, seed: int, rule_of: RuleOf) -> Values:
    """Return the function that makes parameters' initial values; the module may be on the meta device."""
    rules = {name: (parameter.shape, rule_of(name, parameter)) for name, parameter in module.named_parameters()}

    def make(names: Container[str]) -> Iterator[tuple[str, Tensor]]:
        for name, (shape, rule) in rules.items():
            if name in names:
                value = torch.empty(shape)
                rule(value, torch.Generator().manual_seed(key(seed, "parameter", name)))
                yield name, value

    return make


def reset_modules(
    module: nn.Module, seed: int, resets: Mapping[str, Callable[[], object]], keep: Set[Tensor] = frozenset()
) -> None:
    """Run each module's reset with generators keyed by the module's name, children before parents.

    Args:
        resets: Resets by the qualified names of modules. A parameter shared by several modules is set by the first.
        keep: Parameters that no reset may change.
    """
    done = set(keep)
    for name, child in children_first("", module):
        if name in resets:
            reset_module(child, seed, name, resets[name], done)


@torch.no_grad()
def reset_module(module: nn.Module, seed: int, name: str, reset: Callable[[], object], done: set[Tensor]) -> None:
    """Run a module's reset, which must not change parameters that are in `done`; add the module's to `done`."""
    kept = {parameter: parameter.clone() for parameter in module.parameters(recurse=False) if parameter in done}
    with generators_keyed(seed, "module", name):
        reset()
    for parameter, value in kept.items():
        parameter.copy_(value)
    done.update(module.parameters(recurse=False))


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Construct modules on the meta device within the block: shapes without memory or values."""
    with torch.device("meta"), Draws():
        yield


class Draws(TorchFunctionMode):
    """A mode that skips normal draws, which on the meta device take a second; `skipped`: their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = WeakIdKeyDictionary()  # it keeps no tensor in memory

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _ASKS_FOR_MEMORY:
            self.skipped[args[0]] = True
        elif func in (torch.Tensor.normal_, nn.init.normal_):
            drawn = args[0] if args else kwargs["tensor"]
            self.skipped[drawn] = True
            return drawn
        return func(*args, **kwargs)


@contextmanager
def generators_keyed(seed: int, *parts: int | str) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generator from a key within the block; restore them afterwards."""
    number = key(seed, *parts)
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules within a module of this name, with their qualified names, children before parents."""
    for child_name, child in module.named_children():
        yield from children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module
