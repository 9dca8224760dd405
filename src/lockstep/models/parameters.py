"""Parameters that aren't trained: frozen ones, and unsupported ones, which are refused before training."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import listed

_FP32 = torch.float32.itemsize
_NAMED = 3


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose qualified names match one of the patterns (`*`, `?`, `[...]`; `*` crosses dots).

    A tied parameter is frozen under any of its names.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train.
    """
    if not patterns:
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    problems = [_no_match(pattern, list(named)) for pattern in patterns if not _matching(pattern, named)]
    if problems:
        raise ConfigError(problems)
    for pattern in patterns:
        for name in _matching(pattern, named):
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(Problem("", "model.freeze", f"{list(patterns)} freeze every parameter; keep one to train"))


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _no_match(pattern: str, names: list[str]) -> Problem:
    """Return the problem; suggest the pattern for all of a module, or the closest names."""
    if whole := _matching(f"{pattern}.*", names):
        hint = f"did you mean {pattern + '.*'!r} ({len(whole)} parameters)?"
    elif near := difflib.get_close_matches(pattern, names, n=3, cutoff=0.3):
        hint = f"the nearest names: {', '.join(near)}"
    else:
        hint = f"the names begin with {', '.join(sorted({name.partition('.')[0] for name in names})[:8])}"
    return Problem("", "model.freeze", f"{pattern!r} matches none of the model's {len(names)} parameters; {hint}")


def refuse_parameters(model: nn.Module) -> None:
    """Raise ConfigError if a parameter has no shape yet, or can't be trained as it is."""
    problems = [
        Problem("", "model", message)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (message := _problem(f"{path}.{name}".lstrip("."), module, parameter))
    ]
    if low := [name for name, each in model.named_parameters() if each.requires_grad and each.dtype.itemsize < _FP32]:
        dtype = str(model.get_parameter(low[0]).dtype).removeprefix("torch.")
        why = (
            f"{listed(low, _NAMED)}: trained in {dtype}, in which small updates round to nothing; convert what is "
            "trained with .float(), and compute in bf16 with precision.compute: bf16"
        )
        problems.append(Problem("", "model", why))
    if problems:
        raise ConfigError(problems)


def _problem(name: str, module: nn.Module, parameter: nn.Parameter) -> str | None:
    if isinstance(parameter, UninitializedParameter):
        kind = type(module).__name__
        return (
            f"{name} of a {kind} has no shape before the first forward; call the model once on a batch before "
            f"training, or use {kind.removeprefix('Lazy')} with its input size"
        )
    if not parameter.requires_grad:
        return None
    if parameter.is_complex():
        return (
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}, but norms and optimizers take real numbers; "
            "store torch.view_as_real of it as the parameter, and use torch.view_as_complex in the forward"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        return f"{name} has sparse gradients, which aren't supported; set sparse=False"
    return None
