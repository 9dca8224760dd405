"""Builds the optimizer that the config names, or adapts a user's; its step can be discarded."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.core import extensions
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import Optimizer
from lockstep.optim import kernels
from lockstep.optim.adafactor import gated_step as gated_adafactor_step
from lockstep.optim.adafactor import make_state as make_adafactor_state
from lockstep.optim.chunks import chunks
from lockstep.optim.fused import Groups, fused_adam, fused_sgd
from lockstep.optim.groups import facts_of, settle_user_settings
from lockstep.optim.muon import gated_step as gated_muon_step
from lockstep.optim.muon import make_state as make_muon_state
from lockstep.optim.rounded import RoundedAdam
from lockstep.optim.stepping import DeviceGatedOptimizer, HostGatedOptimizer, refuse_closures
from lockstep.plan.optimizers import is_hidden_matrix

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.schema import Optim
    from lockstep.distributed.shard_boxes import RowShards
    from lockstep.optim.chunks import Columns


class Lion(torch.optim.Optimizer):
    """Lion over torch's parameter groups, with `lr` and `weight_decay`; `make_moments` comes before the first step.

        c = beta1 m + (1 - beta1) g        p <- p (1 - lr weight_decay) - lr sign(c)        m <- beta2 m + (1 - beta2) g

    Chen et al. 2023, arXiv:2302.06675, algorithm 2. The paper takes a 3 to 10 times smaller learning rate than AdamW's,
    and a 3 to 10 times larger weight decay.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "betas": betas})

    def make_moments(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self.gated_step(None)

    @torch.no_grad()
    def gated_step(self, found_inf: Tensor | None) -> None:
        """Make the step, but change nothing if `found_inf` (0-dim fp32 on the parameters' device) is 1."""
        for group, columns in self._chunks():
            parameters, grads, moments = columns
            beta1, beta2 = group["betas"]
            directions = list(torch._foreach_lerp(moments, grads, 1 - beta1))
            torch._foreach_sign_(directions)
            kernels.decay_and_step(parameters, directions, group["lr"], group["weight_decay"], found_inf)
            kernels.move_towards(moments, grads, 1 - beta2, found_inf)

    def _chunks(self) -> Iterator[tuple[dict[str, Any], Columns]]:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            moments = [self.state[parameter]["exp_avg"] for parameter in parameters]
            for columns in chunks((parameters, [parameter.grad for parameter in parameters], moments)):
                yield group, columns


def build_optimizer(
    optim: Optim,
    groups: Groups,
    shards: RowShards | None = None,
    compute: torch.dtype | None = None,
    seed: int = 0,
) -> Optimizer:
    """Return the optimizer that the config names, over groups of `parameter_groups`.

    Args:
        shards: How ranks hold the parameters; the groups have this rank's rows; None: they are whole.
        compute: As `resolve_compute` returns it.
        seed: The run's, for stochastic rounding.

    Raises:
        ConfigError: The model has no matrices for muon to update.
    """
    with _without_compiler():
        if any(parameter.dtype is torch.bfloat16 for group in groups for parameter in group["params"]):
            decoupled = optim.name == "adamw"
            return RoundedAdam(groups, optim.betas, optim.eps, decoupled=decoupled, seed=seed, shards=shards)
        return _BUILDERS[optim.name](optim, groups, shards, compute)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep torch's optimizers from importing torch's compiler, which takes 1.4 s.

    They import it to exclude `add_param_group`, which their constructors call, from compilation; nothing is compiled
    here. The attribute is private to torch (`torch._compile`); if it changes, only time is lost.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    method: Any = torch.optim.Optimizer.add_param_group
    plain = getattr(method, "__wrapped__", method)
    plain.__dynamo_disable = plain
    try:
        yield
    finally:
        del plain.__dynamo_disable


class Elementwise(NamedTuple):
    """An elementwise optimizer, which may get any range of a flattened parameter.

    Attributes:
        entries: Names of its state for each element, which begins as zero.
        counts: Whether it also counts updates, in `step`.
    """

    optimizer: torch.optim.Optimizer
    entries: tuple[str, ...]
    counts: bool


def build_elementwise(optim: Optim, groups: Groups) -> Elementwise:
    """Return the torch optimizer that the config names, for DeepSpeed, which steps it; muon and adafactor have none."""
    if optim.name in ("adamw", "adam"):
        rule = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
        adam = rule(groups, betas=optim.betas, eps=optim.eps, fused=True)
        return Elementwise(adam, ("exp_avg", "exp_avg_sq"), counts=True)
    if optim.name == "sgd":
        sgd = torch.optim.SGD(groups, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
        return Elementwise(sgd, ("momentum_buffer",) if optim.momentum else (), counts=False)
    assert optim.name == "lion", f"{optim.name} depends on shapes"
    return Elementwise(Lion(groups, optim.betas), ("exp_avg",), counts=False)


_OF_PACKAGES = {
    "adamw-8bit": ("bitsandbytes.optim", "AdamW8bit"),  # Dettmers et al. 2022, arXiv:2110.02861
    "schedule-free": ("schedulefree", "AdamWScheduleFree"),  # Defazio et al. 2024, arXiv:2405.15682
}


def custom_optimizer(optim: Optim) -> Callable[[Groups], torch.optim.Optimizer] | None:
    """Return the function of parameter groups of another package or of `optim.target`; None: Lockstep's is used."""
    if optim.name in _OF_PACKAGES:
        module, name = _OF_PACKAGES[optim.name]
        try:
            rule = getattr(importlib.import_module(module), name)
        except ImportError as error:
            why = f"{optim.name} needs {module.partition('.')[0]}: {pip_install('optimizers')}"
            raise ConfigError(Problem("", "optim.name", why)) from error
        return partial(rule, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optim.target is None:
        return None
    make = extensions.load("optimizers", optim.target, key="optim.target")
    if not callable(make):
        reason = f"{optim.target} is a {type(make).__name__}, not a class or function of parameter groups"
        raise ConfigError(Problem("", "optim.target", reason))
    if isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
        refuse_closures(make)
    try:
        inspect.signature(make).bind([], **optim.arguments)
    except TypeError as error:
        raise ConfigError(Problem("", "optim.arguments", f"{optim.target}: {error}")) from error
    return partial(make, **optim.arguments)


def adapt_optimizer(torch_optimizer: torch.optim.Optimizer, optim: Optim) -> tuple[Optimizer, Optim]:
    """Return a user's torch optimizer, made from groups of `parameter_groups` or from parameters; and its settings.

    Raises:
        ConfigError: It isn't a torch optimizer, needs a closure or contradicts the config.
    """
    if not isinstance(torch_optimizer, torch.optim.Optimizer):
        raise ConfigError(f"an optimizer must be a torch.optim.Optimizer, not a {type(torch_optimizer).__name__}")
    refuse_closures(type(torch_optimizer))
    used = settle_user_settings(torch_optimizer, optim)
    return HostGatedOptimizer(torch_optimizer), used


class CombinedOptimizer(Optimizer):
    """Two optimizers, each with its own parameters, as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self._parts = (first, second)

    @property
    def groups(self) -> list[dict[str, object]]:
        return [group for part in self._parts for group in part.groups]

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        for part in self._parts:
            part.update(rate, divisor, keep)

    def state_dict(self) -> dict[str, object]:
        states: list[dict[str, Any]] = [part.state_dict() for part in self._parts]
        named = {name: value for state in states for name, value in state["parameters"].items()}
        return {"parameters": named, "groups": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first, second = self._parts
        names = {name for group in second.groups for name in group["names"]}  # type: ignore[attr-defined]
        for part, is_second in ((first, False), (second, True)):
            named = {name: value for name, value in state["parameters"].items() if (name in names) is is_second}
            part.load_state_dict({"parameters": named})


def _muon(optim: Optim, groups: Groups, shards: RowShards | None, compute: torch.dtype | None) -> Optimizer:
    """Return Muon for the hidden matrices, scaled to AdamW's steps (arXiv:2502.16982, section 2.2), and AdamW."""
    hidden, rest = _split(groups)
    if not hidden:
        raise ConfigError(
            Problem("", "optim.name", "muon is for matrices between layers, and the model trains none; take adamw")
        )
    muon = torch.optim.Muon(hidden, momentum=optim.momentum, nesterov=True, adjust_lr_fn="match_rms_adamw")
    make_muon_state(muon)
    dtype = torch.float32 if compute is None else torch.bfloat16
    gated = DeviceGatedOptimizer(muon, partial(gated_muon_step, muon, dtype, shards))
    return CombinedOptimizer(gated, _adamw(optim, rest)) if rest else gated


def _adamw(optim: Optim, groups: Groups) -> Optimizer:
    return fused_adam(groups, optim.betas, optim.eps, decoupled=True)


def _adafactor(groups: Groups, shards: RowShards | None) -> Optimizer:
    """Return Adafactor (Shazeer & Stern 2018, arXiv:1804.04235)."""
    adafactor = torch.optim.Adafactor(groups)
    make_adafactor_state(adafactor)
    return DeviceGatedOptimizer(adafactor, partial(gated_adafactor_step, adafactor, shards))


def _lion(optim: Optim, groups: Groups) -> Optimizer:
    lion = Lion(groups, optim.betas)
    lion.make_moments()
    return DeviceGatedOptimizer(lion, lion.gated_step)


def _split(groups: Groups) -> tuple[Groups, Groups]:
    """Return the groups with their hidden matrices only, and with the other parameters only; no group is empty."""
    hidden: Groups = []
    rest: Groups = []
    for group in groups:
        members: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        for name, parameter in zip(group["names"], group["params"], strict=True):
            members[is_hidden_matrix(facts_of(name, parameter))][name] = parameter
        for named, side in ((members[True], hidden), (members[False], rest)):
            if named:
                side.append({**group, "names": list(named), "params": list(named.values())})
    return hidden, rest


_BUILDERS: Mapping[str, Callable[[Optim, Groups, RowShards | None, torch.dtype | None], Optimizer]] = {
    "adamw": lambda optim, groups, *_: _adamw(optim, groups),
    "adam": lambda optim, groups, *_: fused_adam(groups, optim.betas, optim.eps, decoupled=False),
    "sgd": lambda optim, groups, *_: fused_sgd(groups, optim.momentum, nesterov=optim.nesterov),
    "lion": lambda optim, groups, *_: _lion(optim, groups),
    "muon": _muon,
    "adafactor": lambda optim, groups, shards, _: _adafactor(groups, shards),
}
