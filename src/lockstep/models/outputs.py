"""The outputs of models and the logits in them: a tensor, or a mapping (transformers' outputs are mappings)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.core.errors import RunFailed


def logits_of(outputs: object) -> Tensor:
    """Return the logits in a model's outputs: a tensor, one in a mapping, or the only part of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        logits: Tensor = outputs["logits"]
        return logits
    if isinstance(outputs, tuple | list):  # (logits, None): a loss beside them would be lost
        parts = [part for part in outputs if part is not None]
        if len(parts) == 1 and isinstance(parts[0], Tensor):
            return parts[0]
    raise RunFailed(
        f"the model returned {_described(outputs)}, but this objective needs logits: a tensor, a mapping with the key "
        "`logits`, or a tuple of logits and None. For other outputs set a custom objective (objective.kind: custom)"
    )


def loss_of(outputs: object) -> Tensor:
    """Return the loss that a forward has computed: in a mapping `loss`, in a tuple its only number."""
    parts = outputs if isinstance(outputs, tuple | list) else (outputs,)
    numbers = [part for part in parts if isinstance(part, Tensor) and not part.dim()]
    return numbers[0] if len(numbers) == 1 else part_of(outputs, "loss")


def part_of(outputs: object, name: str) -> Tensor:
    """Return a named tensor among the outputs of a transformers model."""
    tensor = outputs.get(name) if isinstance(outputs, Mapping) else None
    if isinstance(tensor, Tensor):
        return tensor
    raise RunFailed(
        f"the model returned {_described(outputs)}, without `{name}`; give its head the labels that it needs, or set a "
        "custom objective (objective.kind: custom)"
    )


def _described(outputs: object) -> str:
    if isinstance(outputs, tuple | list):
        parts = (list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in outputs)
        return f"a {type(outputs).__name__} of {', '.join(map(str, parts))}"
    return f"a mapping of {sorted(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
