"""The optimizer state that another program saved, by the names of the config's model.

    {"state": {0: {"exp_avg": ...}}, "param_groups": [{"params": [0, 1], "lr": ...}]}          torch, by number
    {"state": {"0.weight": {...}}, "param_groups": [{"params": ["0.weight"], ...}]}            torch, by name
    {"state.0.weight.exp_avg": ..., "param_groups.0.weight.lr": ...}                           torch, flat
        -->  {"0.weight": {"exp_avg": tensor, "step": 2}}

Numbers follow the program's order of its parameters. Without names in the file it is the model's, in one
group, or in two by one of a few rules; exactly one has to fit all shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Optim
from lockstep.core.errors import ConfigError
from lockstep.models.transformers_models import trainer_decays
from lockstep.models.weight_files import Weights, check_plain, readable

ENTRIES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
"""State of each parameter by `optim.name`; Adam's also counts steps."""
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class PeerOptimizer:
    """Optimizer state by number or name: each parameter's tensors and `step`; each group's parameters and settings."""

    place: Path
    states: Mapping[Any, Mapping[str, Any]]
    groups: Sequence[Sequence[Any]]
    settings: Sequence[Mapping[str, Any]] = ()

    @property
    def steps(self) -> int:
        """The largest step count of a parameter; 0 without one."""
        return max((int(state.get("step", 0)) for state in self.states.values()), default=0)


@dataclass(frozen=True, slots=True)
class PeerCheckpoint:
    """A checkpoint of another program.

    Attributes:
        description: What was read, if the name doesn't say it.
        in_order: Whether the weights are in the order of the model that wrote them.
        step, samples: How far it was; None: not recorded.
    """

    weights: Weights
    description: str = ""
    optimizer: PeerOptimizer | None = None
    in_order: bool = False
    of_trainer: bool = False
    step: int | None = None
    samples: int | None = None


def is_optimizer(value: object) -> bool:
    """Return whether a value of a file is the state of a torch optimizer, in any of the three forms."""
    if not isinstance(value, Mapping):
        return False
    return "param_groups" in value or any(isinstance(key, str) and key.startswith("param_groups.") for key in value)


def peer_optimizer(place: Path, saved: Mapping[Any, Any]) -> PeerOptimizer:
    """Return the state of a torch optimizer, checked. Raises ConfigError for another layout."""
    if "param_groups" not in saved:
        return _flat(place, saved)
    try:
        groups = saved["param_groups"]
        groups = list(groups.values()) if isinstance(groups, Mapping) else groups
        numbers = [number for group in groups for number in group.get("params", ())]
        keys = [[*group.get("param_names", group.get("params", ()))] for group in groups]
        named = dict(zip(numbers, [key for group in keys for key in group], strict=True))
        states = {named.get(key, key): {**state} for key, state in saved.get("state", {}).items()}
        settings = [_settings(group) for group in groups]
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{place}: the optimizer's state isn't in torch's format: {error}") from error
    return PeerOptimizer(place, {key: _checked(place, key, state) for key, state in states.items()}, keys, settings)


def _flat(place: Path, saved: Mapping[Any, Any]) -> PeerOptimizer:
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        kind, _, rest = str(key).partition(".")
        name, _, entry = rest.rpartition(".")
        target = {"state": states, "param_groups": settings}.get(kind)
        if target is not None and name:
            target.setdefault(name, {})[entry] = value
    checked = {name: _checked(place, name, state) for name, state in states.items()}
    return PeerOptimizer(place, checked, [[name] for name in settings], [*map(_settings, settings.values())])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    single = {
        key: each.item() if isinstance(each, Tensor) and each.numel() == 1 else each for key, each in group.items()
    }
    return {key: each for key, each in single.items() if (_is_pair if key == "betas" else _is_number)(each)}


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _checked(place: Path, key: object, state: Mapping[str, Any]) -> dict[str, Any]:
    for entry, value in state.items():
        if isinstance(value, Tensor):
            check_plain(place, f"{entry} of {key}", value)
    step = state.get("step", 0)
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(number, int | float) or not 0 <= number < 2**48 or int(number) != number:
        raise ConfigError(f"{place}: the optimizer's step of {readable(str(key))} is {number}")
    return {**state, "step": int(number)} if "step" in state else {**state}


def named_optimizer(
    peer: PeerOptimizer, model: nn.Module, order: Sequence[str], renamed: Mapping[str, str], *, of_trainer: bool
) -> PeerOptimizer:
    """Return the state under the names of the model's parameters.

    Args:
        order: Names of the model's parameters in the order of the program that wrote the file.
        renamed: The model's names by the file's.
        of_trainer: Whether transformers' Trainer made the groups.

    Raises:
        ConfigError: The file has numbers only, and not exactly one order of the parameters fits.
    """
    keys = [[_name(key, renamed) if isinstance(key, str) else key for key in group] for group in peer.groups]
    states = {_name(key, renamed) if isinstance(key, str) else key: state for key, state in peer.states.items()}
    if not all(isinstance(key, str) for group in (states, *keys) for key in group):
        ordered = _only_order(peer, keys, states, model, order, of_trainer=of_trainer)
        names = dict(zip((key for group in keys for key in group), ordered, strict=True))
        states = {names[key]: state for key, state in states.items()}
        keys = [[names[key] for key in group] for group in keys]
    return replace(peer, states=states, groups=keys)


def _name(name: str, renamed: Mapping[str, str]) -> str:
    for wrapper in _WRAPPERS:
        name = name if name in renamed else name.replace(wrapper, "")
    return renamed.get(name, name)


def _only_order(
    peer: PeerOptimizer,
    keys: Sequence[Sequence[Any]],
    states: Mapping[Any, Mapping[str, Any]],
    model: nn.Module,
    order: Sequence[str],
    *,
    of_trainer: bool,
) -> tuple[str, ...]:
    parameters = dict(model.named_parameters())

    def fits(groups: Sequence[Sequence[str]]) -> bool:
        if [*map(len, groups)] != [*map(len, keys)]:
            return False
        return all(
            parameters[name].shape == value.shape
            for names, numbers in zip(groups, keys, strict=True)
            for name, number in zip(names, numbers, strict=True)
            for entry, value in states.get(number, {}).items()
            if isinstance(value, Tensor) and entry != "step"
        )

    trained = [name for name in order if parameters[name].requires_grad]
    splits = [trainer_decays(model).__contains__] if of_trainer else _splits(model)
    candidates = [[names] for names in ([*order], trained)] if len(keys) == 1 else []
    for split in splits if len(keys) == 2 else ():
        for names in (order, trained):
            halves = [[name for name in names if split(name) is first] for first in (True, False)]
            candidates += [halves, halves[::-1]]
    fitting = {tuple(name for group in groups for name in group) for groups in candidates if fits(groups)}
    if len(fitting) == 1:
        return fitting.pop()
    sizes = " and ".join(str(len(group)) for group in keys)
    why = "several orders of the model's parameters fit" if fitting else "no usual order of the model's parameters fits"
    raise ConfigError(
        f"{peer.place}: the optimizer's parameters have numbers, not names, in groups of {sizes}, and {why}. Save them "
        f"with names (make the optimizer from named_parameters()), or import only weights, without --config"
    )


def _splits(model: nn.Module) -> Sequence[Callable[[str], bool]]:
    """Return the usual rules for parameters with weight decay: by dims; no biases and norms; no biases."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())

    def in_norm(name: str) -> bool:
        return "norm" in type(modules[name.rpartition(".")[0]]).__name__.lower()

    return (
        lambda name: parameters[name].dim() >= 2,
        lambda name: not name.endswith("bias") and not in_norm(name),
        lambda name: not name.endswith("bias"),
    )


def moments(named: PeerOptimizer, optim: Optim, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the entries of a saved state for an optimizer of the config. Raises ConfigError."""
    wanted = () if optim.name == "sgd" and not optim.momentum else ENTRIES[optim.name]
    tensors, place = dict[str, Tensor](), named.place
    states = {name: state for name, state in named.states.items() if state}
    for name in sorted(states.keys() ^ trained.keys()) if wanted else ():
        trains, has = ("trains", "has no") if name in trained else ("doesn't train", "has")
        raise ConfigError(f"the config's model {trains} {name}, but {place} {has} optimizer state of it")
    for name, state in states.items():
        entries = [entry for entry in state if entry != "step" and state[entry] is not None]
        if sorted(entries) != sorted(wanted):
            kept, own = (", ".join(map(readable, names)) or "nothing" for names in (entries, wanted))
            raise ConfigError(f"{place}: its optimizer keeps {kept} of {name}, but {optim.name} keeps {own}")
        for entry in wanted:
            if not isinstance(state[entry], Tensor) or state[entry].shape != trained[name].shape:
                shape = list(getattr(state[entry], "shape", ()))
                raise ConfigError(f"{place}: {entry} of {name} is {shape}, but it is {list(trained[name].shape)}")
            tensors[f"optimizer.{entry}.{name}"] = state[entry]
        if "exp_avg" in wanted:
            tensors[f"optimizer.step.{name}"] = torch.tensor(float(state.get("step", 0)))
    return tensors
