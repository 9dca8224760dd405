"""From a name in the config to an optimizer whose step can be discarded.

adamw, adam, sgd    fused kernels                                fused.py
lion                our own, on torch's foreach operations       lion.py
muon                torch.optim.Muon for the matrices between the layers, AdamW for the rest
adafactor           torch.optim.Adafactor
a user's            any torch optimizer                          adapt_optimizer
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.optim.fused import FusedAdam, FusedSGD, Groups
from lockstep.optim.groups import facts_of
from lockstep.optim.lion import Lion
from lockstep.optim.own_settings import settle
from lockstep.optim.stepping import DeviceGatedOptimizer, HostGatedOptimizer, refuse_closures
from lockstep.plan.grouping import is_hidden_matrix

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.schema import Optim
    from lockstep.core.protocols import Optimizer


def build_optimizer(optim: Optim, groups: Groups) -> Optimizer:
    """The optimizer that the config names, over groups of `parameter_groups`.

    Raises:
        ConfigError: it has nothing to work on.
    """
    with _compiler_left_out():
        return _BUILDERS[optim.name](optim, groups)


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """torch's optimizers import its compiler, for 1.4 s, to have it leave `add_param_group` alone, which is called as
    they are made. Nothing is compiled meanwhile, so that can wait. How is private to torch (`torch._compile`); if it
    changes, all there is to lose is time."""
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
    """An optimizer that looks at no parameter's shape: it may be given any stretch of elements, one after the other.

    Attributes:
        entries: what it keeps of each element, zero at first.
        counts: it also counts updates, in `step`.
    """

    optimizer: torch.optim.Optimizer
    entries: tuple[str, ...]
    counts: bool


def build_elementwise(optim: Optim, groups: Groups) -> Elementwise:
    """As `build_optimizer`, for whoever steps a torch optimizer by himself. Not of muon and adafactor."""
    if optim.name in ("adamw", "adam"):
        rule = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
        adam = rule(groups, betas=optim.betas, eps=optim.eps, fused=True)
        return Elementwise(adam, ("exp_avg", "exp_avg_sq"), counts=True)
    if optim.name == "sgd":
        sgd = torch.optim.SGD(groups, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
        return Elementwise(sgd, ("momentum_buffer",) if optim.momentum else (), counts=False)
    assert optim.name == "lion", f"{optim.name} looks at shapes"
    return Elementwise(Lion(groups, optim.betas), ("exp_avg",), counts=False)


def adapt_optimizer(torch_optimizer: torch.optim.Optimizer, optim: Optim) -> tuple[Optimizer, Optim]:
    """A user's torch optimizer, made from groups of `parameter_groups` or from parameters; and the settings it has.

    The run's schedule sets the learning rate of every group: its rate times the group's `lr_scale`, 1 if it has none.
    On a GPU the host waits at each update to learn whether it is kept, since nothing is known of what `step` does.

    Raises:
        ConfigError: not a torch optimizer, or one that needs a closure, or that contradicts the config.
    """
    if not isinstance(torch_optimizer, torch.optim.Optimizer):
        raise ConfigError(f"an optimizer must be a torch.optim.Optimizer, not a {type(torch_optimizer).__name__}")
    refuse_closures(type(torch_optimizer))
    used = settle(torch_optimizer, optim)
    return HostGatedOptimizer(torch_optimizer, saves_groups=True), used


class CombinedOptimizer:
    """Two optimizers, each over its own parameters, as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self._parts = (first, second)

    @property
    def groups(self) -> list[dict[str, object]]:
        return [group for part in self._parts for group in part.groups]

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """See `core.protocols.Optimizer`."""
        for part in self._parts:
            part.update(rate, divisor, keep)

    def state_dict(self) -> dict[str, object]:
        states: list[dict[str, Any]] = [part.state_dict() for part in self._parts]
        return {"parameters": {name: value for state in states for name, value in state["parameters"].items()},
                "groups": []}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first, second = self._parts
        names = {name for group in second.groups for name in group["names"]}  # type: ignore[attr-defined]
        found: dict[str, Any] = state["parameters"]
        first.load_state_dict({"parameters": {name: found[name] for name in found if name not in names}})
        second.load_state_dict({"parameters": {name: found[name] for name in found if name in names}})


def _adamw(optim: Optim, groups: Groups) -> Optimizer:
    return FusedAdam(groups, optim.betas, optim.eps, decoupled=True)


def _adam(optim: Optim, groups: Groups) -> Optimizer:
    return FusedAdam(groups, optim.betas, optim.eps, decoupled=False)


def _sgd(optim: Optim, groups: Groups) -> Optimizer:
    return FusedSGD(groups, optim.momentum, nesterov=optim.nesterov)


def _lion(optim: Optim, groups: Groups) -> Optimizer:
    return DeviceGatedOptimizer(Lion(groups, optim.betas))


def _adafactor(optim: Optim, groups: Groups) -> Optimizer:
    """Shazeer & Stern 2018, arXiv:1804.04235. It counts steps with the host, so it can't be selected on a GPU."""
    return HostGatedOptimizer(torch.optim.Adafactor(groups), saves_groups=False)


def _muon(optim: Optim, groups: Groups) -> Optimizer:
    """Jordan et al. 2024; steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2),
    so that one learning rate fits both parts."""
    hidden, rest = _split(groups)
    if not hidden:
        raise ConfigError(
            Problem("", "optim.name", "muon is for matrices between layers, and the model trains none; take adamw")
        )
    muon = torch.optim.Muon(hidden, momentum=optim.momentum, nesterov=True, adjust_lr_fn="match_rms_adamw")
    for group in muon.param_groups:  # at once, so that a first update can be discarded on a GPU
        for parameter in group["params"]:
            muon.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return CombinedOptimizer(DeviceGatedOptimizer(muon), _adamw(optim, rest)) if rest else DeviceGatedOptimizer(muon)


def _split(groups: Groups) -> tuple[Groups, Groups]:
    """The groups' matrices between layers, and everything else; no group is empty."""
    hidden: Groups = []
    rest: Groups = []
    for group in groups:
        for chosen, side in ((True, hidden), (False, rest)):
            members = [
                (name, parameter)
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if is_hidden_matrix(facts_of(name, parameter)) is chosen
            ]
            if members:
                names, parameters = zip(*members, strict=True)
                side.append({**group, "names": list(names), "params": list(parameters)})
    return hidden, rest


_BUILDERS: Mapping[str, Callable[[Optim, Groups], Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "muon": _muon,
    "adafactor": _adafactor,
}
