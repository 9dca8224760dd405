"""The outputs of models and the logits in them: a tensor, or a mapping (transformers' outputs are mappings)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.core.errors import RunFailed


def logits_of(outputs: object) -> Tensor:
    """Return the logits in a model's outputs.

    Raises:
        RunFailed: The outputs are neither a tensor nor a mapping with `logits`.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        logits: Tensor = outputs["logits"]
        return logits
    raise RunFailed(
        f"the model returned {_described(outputs)}, but this objective needs logits: a tensor, or a mapping with the "
        "key `logits`. For other outputs set a custom objective (objective.kind: custom)"
    )


def part_of(outputs: object, name: str) -> Tensor:
    """Return a named tensor among the outputs of a transformers model.

    Raises:
        RunFailed: There is none.
    """
    tensor = outputs.get(name) if isinstance(outputs, Mapping) else None
    if isinstance(tensor, Tensor):
        return tensor
    raise RunFailed(
        f"the model returned {_described(outputs)}, without `{name}`; give its head the labels that it needs, or set a "
        "custom objective (objective.kind: custom)"
    )


def _described(outputs: object) -> str:
    return f"a mapping of {sorted(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
