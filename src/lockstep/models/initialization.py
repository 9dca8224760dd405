"""Initial values keyed by name: the same under every strategy, on every device, in any order of construction.

    own models      every parameter       = rule(key(seed, "parameter", its name), its shape)
    transformers    every module's reset  = its own code, run under key(seed, "module", its name)
    your own        the constructor       = your code, run under key(seed, "construction")

A constructor's values are never overwritten in a module of yours: it may have loaded weights or zeroed a head, and
nobody can tell that from the outside. No generator of the process is advanced by any of this.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.core.keys import key

Rule = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor in place, drawing from the generator alone."""


def normal(std: float) -> Rule:
    """Normal with mean 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def constant(value: float) -> Rule:
    """The same value everywhere."""
    return lambda tensor, generator: tensor.fill_(value)


RuleOf = Callable[[str, Tensor], Rule]
"""The rule of a parameter, from its name and the tensor (its shape)."""


@torch.no_grad()
def initialize(module: nn.Module, seed: int, rule_of: RuleOf) -> None:
    """Fills every parameter by its rule; a tied one once, under its first name."""
    parameters = dict(module.named_parameters())
    for name, values in initial_tensors(module, seed, rule_of):
        parameters[name].copy_(values)


def initial_tensors(module: nn.Module, seed: int, rule_of: RuleOf) -> Iterator[tuple[str, Tensor]]:
    """What each parameter of the module begins with, one after the other."""
    for name, parameter in module.named_parameters():
        yield name, initial_values(seed, name, parameter.shape, rule_of(name, parameter))


def initial_values(seed: int, name: str, shape: torch.Size, rule: Rule) -> Tensor:
    """Initial values of one parameter, whole, fp32, on the CPU: what a shard of it is cut from."""
    generator = torch.Generator().manual_seed(key(seed, "parameter", name))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    rule(values, generator)
    return values


def reset_modules(
    module: nn.Module,
    seed: int,
    resets: Mapping[str, Callable[[], object]],
    keep: Set[Tensor] = frozenset(),
) -> None:
    """Runs each module's own reset under a generator keyed by the module's name, children before parents.

    Args:
        resets: by the qualified name of the module. A parameter shared by several modules is set by the first.
        keep: parameters that must stay as they are, whatever a reset does.
    """
    done = set(keep)
    for name, child in _children_first("", module):
        if name not in resets:
            continue
        own = dict(child.named_parameters(recurse=False))
        kept = {parameter: parameter.detach().clone() for parameter in own.values() if parameter in done}
        with torch.no_grad(), generators_keyed(seed, "module", name):
            resets[name]()
            for parameter, value in kept.items():
                parameter.copy_(value)
        done.update(child.parameters(recurse=False))


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules are made on the meta device inside: shapes, no memory, no values."""
    with torch.device("meta"), Draws():
        yield


class Draws(TorchFunctionMode):
    """Leaves out normal draws: on the meta device they do nothing but import 800 modules, which takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []

    def was_drawn(self, tensor: Tensor) -> bool:
        """Whether a draw into it was left out."""
        return any(one is tensor for one in self._drawn)

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, nn.init.normal_):
            self._drawn.append(args[0] if args else kwargs["tensor"])
            return self._drawn[-1]
        return func(*args, **kwargs)


@contextmanager
def generators_keyed(seed: int, *parts: int | str) -> Iterator[None]:
    """Python's, NumPy's and torch's CPU generator start from the key inside, and are as before afterwards."""
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


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module
