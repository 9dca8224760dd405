"""Errors for a forward that doesn't take the data's inputs, by name.

forward(ids)    data gives tokens, mask    ->    add to model.inputs: {tokens: ids, mask: null}
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import Inputs

_WRAPPED = ("module", "_orig_mod")
"""The attributes where wrappers that pass their inputs on (DDP, torch.compile) hold the wrapped module."""
_DTYPES_DIFFER = re.compile(r"dtype|scalar type|Input type|input type", re.ASCII)


def inputs_misfit(module: nn.Module, inputs: Inputs) -> ConfigError | None:
    """Return the error if the forward doesn't take the inputs; None: it does, and an error has other reasons."""
    module = _unwrapped(module)
    signature = _plain(inspect.signature(module.forward))
    name = _class_name(module)
    try:
        signature.bind(*inputs) if isinstance(inputs, tuple) else signature.bind(**inputs)
    except TypeError:
        taken = f"forward{signature}"
        if isinstance(inputs, tuple):
            given = f"{len(inputs)} input{'s' * (len(inputs) != 1)} without a name"
            return ConfigError(Problem("", "model", f"{name} has {taken}, and the data gives {given}"))
        parameters = signature.parameters.items()
        lacking = [key for key, parameter in parameters if _is_required(parameter) and key not in inputs]
        differences = _differences(signature, inputs, lacking)
        return ConfigError(Problem("", "model.inputs", f"{name} has {taken}, and {differences}"))
    main = getattr(module, "main_input_name", None)  # of a model of the transformers library
    if not isinstance(main, str) or main not in signature.parameters or {main, "inputs_embeds"} & set(inputs):
        return None
    if isinstance(inputs, tuple) or all(key in signature.parameters for key in inputs):
        return None
    differences = _differences(signature, inputs, [main])  # the data's inputs went into `**kwargs`
    return ConfigError(Problem("", "model.inputs", f"the forward of {name} takes {main}, and {differences}"))


def dtypes_misfit(module: nn.Module, inputs: Inputs, error: Exception) -> ConfigError | None:
    """Return the error if a forward has failed because inputs have another dtype than the weights; None otherwise."""
    if _DTYPES_DIFFER.search(str(error)) is None:
        return None
    weights = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    named = enumerate(inputs, 1) if isinstance(inputs, tuple) else inputs.items()
    given = {name: part.dtype for name, part in named if isinstance(part, Tensor) and part.dtype not in weights}
    if not given or not weights:
        return None
    shown = ", ".join(f"{name}: {dtype}" for name, dtype in given.items())
    kinds = " and ".join(sorted(map(str, weights)))
    why = (
        f"the forward fails on dtypes ({error}): the data gives {shown}, and the weights are {kinds}; convert the data "
        "in the dataset, or the model, such as with .float()"
    )
    return ConfigError(Problem("", "model", why))


def refuse_unknown_names(module: nn.Module, names: Mapping[str, str | None]) -> None:
    """Raise ConfigError if the forward has no inputs of the names in `model.inputs`, before any data is read.

    Args:
        names: The data's names to the forward's; None: the input is left out.
    """
    signature = _plain(inspect.signature(module.forward))
    parameters = signature.parameters
    unknown = {given: new for given, new in names.items() if new is not None and new not in parameters}
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    lacking = [key for key, parameter in parameters.items() if _is_required(parameter) and key not in names.values()]
    meant = dict(zip(unknown, [*lacking, *[None] * len(unknown)], strict=False))
    written = f"model.inputs: {_as_yaml({**names, **meant})} (null leaves an input out)"
    why = f"{_as_yaml(unknown)}, but {_class_name(module)} has forward{signature}; write {written}"
    raise ConfigError(Problem("", "model.inputs", why))


def _as_yaml(names: Mapping[str, str | None]) -> str:
    return f"{{{', '.join(f'{given}: {new}' if new else f'{given}: null' for given, new in names.items())}}}"


def _class_name(module: nn.Module) -> str:
    """Return the name of the user's class, which fsdp replaces by a subclass."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers that pass their inputs on."""
    children = dict(module.named_children())
    inner = next((children[name] for name in _WRAPPED if name in children), None)
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return module if inner is None or inspect.Parameter.VAR_KEYWORD not in kinds else _unwrapped(inner)


def _plain(signature: inspect.Signature) -> inspect.Signature:
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return inspect.Signature(parameters)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _differences(signature: inspect.Signature, inputs: Inputs, lacking: Sequence[str]) -> str:
    assert not isinstance(inputs, tuple)
    unknown = [name for name in inputs if name not in signature.parameters]
    if not unknown:
        return f"the data gives {', '.join(inputs)}: {', '.join(lacking)} is missing; give it a default, or in the data"
    renamed = _as_yaml(dict(zip(unknown, [*lacking, *[None] * len(unknown)], strict=False)))
    return f"the data gives {', '.join(inputs)}; add to model.inputs: {renamed} (null leaves an input out)"
