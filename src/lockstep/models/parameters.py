"""Parameters that aren't trained: frozen ones, and unsupported ones, which are refused before training."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lockstep.core.errors import ConfigError, Problem, refuse
from lockstep.core.formatting import listed
from lockstep.distributed.shard_boxes import dtype_name

_FP32 = torch.float32.itemsize
_NAMED = 3
_SHARED = "are two parameters in one memory; assign one to both, or use first.weight.t() in the forward"


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters with a qualified name, or another name if tied, that matches a pattern; `*` crosses dots.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train.
    """
    if not patterns:
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    refuse(_no_match(pattern, list(named)) for pattern in patterns if not _matching(pattern, named))
    for pattern in patterns:
        for name in _matching(pattern, named):
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(Problem("", "model.freeze", f"{list(patterns)} freeze every parameter; keep one to train"))


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _no_match(pattern: str, names: list[str]) -> Problem:
    if whole := _matching(f"{pattern}.*", names):
        hint = f"did you mean {pattern + '.*'!r} ({len(whole)} parameters)?"
    elif near := difflib.get_close_matches(pattern, names, n=3, cutoff=0.3):
        hint = f"the nearest names: {', '.join(near)}"
    else:
        hint = f"the names begin with {', '.join(sorted({name.partition('.')[0] for name in names})[:8])}"
    return Problem("", "model.freeze", f"{pattern!r} matches none of the model's {len(names)} parameters; {hint}")


def refuse_parameters(model: nn.Module, dtypes: Collection[str]) -> None:
    """Raise ConfigError for parameters that can't be trained, and for tensors that no checkpoint holds (`dtypes`)."""
    problems = [
        Problem("", "model", message)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (message := _problem(f"{path}.{name}".lstrip("."), module, parameter))
    ]
    if low := [name for name, each in model.named_parameters() if each.requires_grad and each.dtype.itemsize < _FP32]:
        dtype = str(model.get_parameter(low[0]).dtype).removeprefix("torch.")
        why = (
            f"{listed(low, _NAMED)}: trained in {dtype}, which rounds small updates to nothing; convert what is "
            "trained with .float(), and compute in bf16 with precision.compute: bf16"
        )
        problems.append(Problem("", "model", why))
    first: dict[int, str] = {}
    problems += [
        Problem("", "model", f"{first[place]} and {name} {_SHARED}")
        for name, each in model.named_parameters()
        if type(each) is nn.Parameter
        and type(each.data) is Tensor
        and (place := each.data_ptr())
        and first.setdefault(place, name) != name
    ]
    problems += [
        _unsaved(name, tensor, dtypes)
        for name, tensor in _kept(model)
        if tensor.layout is not torch.strided or tensor.is_nested or dtype_name(tensor.dtype) not in dtypes
    ]
    refuse(problems)


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from (pair for pair in model.named_parameters() if not pair[1].requires_grad)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


def _unsaved(name: str, tensor: Tensor, dtypes: Collection[str]) -> Problem:
    what = dtype_name(tensor.dtype) if tensor.layout is torch.strided else str(tensor.layout)
    remedy = "store torch.view_as_real of it" if tensor.is_complex() else "convert it"
    why = (
        f"{name} is {'nested' if tensor.is_nested else what}, and a checkpoint holds dense tensors of "
        f"{', '.join(dtypes)}; {remedy}, or register a constant as a buffer with persistent=False"
    )
    return Problem("", "model", why)


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
