"""Model and optimizer as named tensors, and back.

model.layers.0.weight                 parameters and saved buffers, tied ones once
optimizer.exp_avg.layers.0.weight     entry, then the parameter it belongs to
values: {"optimizer": {PARAMETER: {ENTRY: number}}, "groups": [...], "tied": {NAME: NAME}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import full_tensor, is_sharded

if TYPE_CHECKING:
    from torch import nn

    from lockstep.core.protocols import Optimizer

_MODEL, _OPTIMIZER = "model.", "optimizer."
_NAMED = 5
_PLAIN = (str, int, float, bool, type(None))


Fit = Callable[[str, Tensor], Tensor]
"""Optimizer state of the named parameter, in another form."""


def _as_it_is(name: str, value: Tensor) -> Tensor:
    return value


def live_state(model: nn.Module, optimizer: Optimizer, shown: Fit = _as_it_is) -> TrainingState:
    """Args:
        shown: what is held of optimizer state, as a part of what it is a part of.

    Raises:
        RunFailed: something keeps state that is neither a tensor nor plain.
    """
    tensors, tied = of_model(model)
    parameters = {name for name, _ in model.named_parameters()}
    changing = frozenset(f"{_MODEL}{name}" for name in tensors if name not in parameters)
    found = {f"{_MODEL}{name}": tensor for name, tensor in tensors.items()}
    saved = cast("Any", optimizer.state_dict())
    numbers: dict[str, dict[str, Any]] = {}
    for name, entries in saved["parameters"].items():
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                found[f"{_OPTIMIZER}{entry}.{name}"] = shown(name, value)
            else:
                numbers.setdefault(name, {})[entry] = _plain(f"the optimizer's {entry} of {name}", value)
    groups = [
        {key: _plain(f"the optimizer's {key}", value) for key, value in group.items()} for group in saved["groups"]
    ]
    return TrainingState(found, {"optimizer": numbers, "groups": groups, "tied": tied}, changing)


@torch.no_grad()
def restore_state(model: nn.Module, optimizer: Optimizer, state: TrainingState, fit: Fit = _as_it_is) -> None:
    """See `core.protocols.Sharding.restore`.

    Args:
        fit: saved optimizer state, as the optimizer has it.
    """
    tensors, _ = of_model(model)
    for name, tensor in tensors.items():
        _local(tensor).copy_(_saved(state, f"{_MODEL}{name}"))
    entries: dict[str, dict[str, Any]] = {name: dict(found) for name, found in state.values["optimizer"].items()}
    for key, value in state.tensors.items():
        if key.startswith(_OPTIMIZER):
            entry, _, name = key.removeprefix(_OPTIMIZER).partition(".")
            entries.setdefault(name, {})[entry] = fit(name, value)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            entries.setdefault(name, {})
    optimizer.load_state_dict({"parameters": entries, "groups": list(state.values["groups"])})


def whole_weights(model: nn.Module, wanted: bool) -> Iterator[tuple[str, Tensor]]:
    """See `core.protocols.Sharding.weights`."""
    return _whole(of_model(model)[0].items(), wanted)


def whole_gradients(model: nn.Module, wanted: bool) -> Iterator[tuple[str, Tensor]]:
    """See `core.protocols.Sharding.gradients`."""
    found = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return _whole(((name, grad) for name, grad in found if grad is not None), wanted)


def without_gradient(model: nn.Module) -> list[str]:
    """Names of the trained parameters that have none."""
    return [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]


def unused_parameters(names: Sequence[str], *, where: str = "", before: str = "") -> ConfigError:
    """What is wrong with trained parameters that no gradient reaches, and the remedy.

    Args:
        where: on which rank, of which micro-batch; nothing: anywhere in the first update.
        before: what has to change first so that a sample may leave a parameter out (`plan.refusals.before_unused`).
    """
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    it = "it" if len(names) == 1 else "them"
    message = (
        f"{shown}: no gradient reaches {it}{where and f' {where}'}. Freeze what isn't trained "
        f'(model.freeze: ["{names[0]}"]), or, if other batches do use {it}, '
        f"{before}set parallel.ddp.find_unused_parameters: true"
    )
    return ConfigError(Problem("", "model", message))


def _whole(parts: Iterable[tuple[str, Tensor]], wanted: bool) -> Iterator[tuple[str, Tensor]]:
    """Of a sharded tensor all of it, which every rank is sent."""
    for name, tensor in parts:
        found = full_tensor(tensor) if is_sharded(tensor) else tensor
        if wanted:
            yield name, found.detach().cpu()


def of_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and saved buffers, each once under its first name; and the other names of tied ones."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise RunFailed(f"the model's {name} is a {type(value).__name__}: only tensors can be saved")
        first = first_names.setdefault(id(value), name)
        if first == name:
            tensors[name] = value
        else:
            tied[name] = first
    return tensors, tied


def _saved(state: TrainingState, name: str) -> Tensor:
    if name not in state.tensors:
        raise RunFailed(f"the saved state has no {name.removeprefix(_MODEL)}")
    return cast("Tensor", state.tensors[name])


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return cast("Tensor", cast("Any", tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def _plain(what: str, value: object) -> object:
    """As JSON has it."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(what, part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(what, part) for key, part in value.items()}
    raise RunFailed(f"{what} is a {type(value).__name__}: it can't be saved; tensors, numbers and texts can")
