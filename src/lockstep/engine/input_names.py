"""Why a model's forward doesn't take what the data gives, by name.

forward(ids)    data gives tokens, mask    ->    write model.inputs: {tokens: ids, mask: null}
"""

from __future__ import annotations

import inspect

from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import Inputs

_WRAPPED = ("module", "_orig_mod")
"""As wrappers that hand inputs on (DDP, torch.compile) call what they wrap."""


def inputs_misfit(module: nn.Module, inputs: Inputs) -> ConfigError | None:
    """None: the forward takes them, and an error has other reasons."""
    module = _unwrapped(module)
    signature = _plain(inspect.signature(module.forward))
    try:
        signature.bind(*inputs) if isinstance(inputs, tuple) else signature.bind(**inputs)
    except TypeError:
        name, taken = type(module).__name__, f"forward{signature}"
        if isinstance(inputs, tuple):
            given = f"{len(inputs)} input{'s' * (len(inputs) != 1)} without a name"
            return ConfigError(Problem("", "model", f"{name} has {taken}, and the data gives {given}"))
        return ConfigError(Problem("", "model.inputs", f"{name} has {taken}, and {_differences(signature, inputs)}"))
    return None


def _unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, inside those that hand on whatever they are given."""
    children = dict(module.named_children())
    inner = next((children[name] for name in _WRAPPED if name in children), None)
    kinds = [one.kind for one in inspect.signature(module.forward).parameters.values()]
    return module if inner is None or inspect.Parameter.VAR_KEYWORD not in kinds else _unwrapped(inner)


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """Without annotations."""
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return inspect.Signature(parameters)


def _differences(signature: inspect.Signature, inputs: Inputs) -> str:
    assert not isinstance(inputs, tuple)
    parameters = signature.parameters
    unknown = [name for name in inputs if name not in parameters]
    lacking = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and name not in inputs
    ]
    if not unknown:
        return f"the data gives {', '.join(inputs)}: {', '.join(lacking)} is missing; give it a default, or in the data"
    renamed = dict(zip(unknown, [*lacking, *["null"] * len(unknown)], strict=False))
    written = ", ".join(f"{name}: {new}" for name, new in renamed.items())
    return f"the data gives {', '.join(inputs)}; write model.inputs: {{{written}}} (null leaves an input out)"
