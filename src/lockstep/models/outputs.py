"""What models return, and the logits in it: a tensor, or a mapping (transformers' outputs are mappings)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.core.errors import RunFailed


def logits_of(outputs: object) -> Tensor:
    """Raises:
    RunFailed: neither a tensor nor a mapping with `logits`.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        logits: Tensor = outputs["logits"]
        return logits
    found = f"a mapping of {sorted(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
    raise RunFailed(
        f"the model returned {found}; this objective needs logits: a tensor, or a mapping with the key `logits`. "
        "For anything else give an objective of your own (objective.kind: custom)"
    )


def part_of(outputs: object, name: str) -> Tensor:
    """A named tensor among the outputs of a transformers model.

    Raises:
        RunFailed: there is none.
    """
    found = outputs.get(name) if isinstance(outputs, Mapping) else None
    if isinstance(found, Tensor):
        return found
    made = f"a mapping of {sorted(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
    raise RunFailed(
        f"the model returned {made}, without `{name}`; give its head the labels it wants, or give an objective of your "
        "own (objective.kind: custom)"
    )
