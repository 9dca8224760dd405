"""Parameters that can't be trained here, named before anything is trained."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lockstep.core.errors import ConfigError, Problem


def refuse_parameters(model: nn.Module) -> None:
    """Raises ConfigError: a parameter has no shape yet, is complex, or gets sparse gradients."""
    problems = [
        Problem("", "model", message)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (message := _problem(f"{path}.{name}".lstrip("."), module, parameter))
    ]
    if problems:
        raise ConfigError(problems)


def _problem(name: str, module: nn.Module, parameter: nn.Parameter) -> str | None:
    if isinstance(parameter, UninitializedParameter):
        kind = type(module).__name__
        return (
            f"{name} of a {kind} has no shape before the first forward; call the model once on a batch before it is "
            f"trained, or write {kind.removeprefix('Lazy')} with its input size"
        )
    if not parameter.requires_grad:
        return None
    if parameter.is_complex():
        return (
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}, and norms and optimizers take real numbers; "
            "make torch.view_as_real of it the parameter, and take torch.view_as_complex in the forward"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        return f"{name} gets sparse gradients, which are not reduced here; write sparse=False"
    return None
