"""What a module draws in its forward, turned off: dropout is keyed by update, data rank and micro-batch, so that it
differs between numbers of ranks by design, and two correct runs would differ too.

    nn.Dropout(p)            p = 0
    attention_dropout=0.1    a number on a module, or on the config that a transformers model reads: 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_WORDS = ("drop", "jitter")
_LISTED = 4


def without_randomness(model: nn.Module) -> str | None:
    """Sets to 0 what is found, in place, and says what that was; None: nothing."""
    found: dict[str, float] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        _silence(module, prefix, found, always_p=_is_dropout(module))
        config = getattr(module, "config", None)
        if config is not None and id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            _silence(config, f"{prefix}config.", found)
    if not found:
        return None
    listed = ", ".join(f"{name} {value:g}" for name, value in list(found.items())[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"dropout is 0 for the proof ({listed}{more}): it is drawn for each rank and micro-batch"


def _is_dropout(module: nn.Module) -> bool:
    return "dropout" in type(module).__name__.lower()


def _silence(holder: Any, prefix: str, found: dict[str, float], *, always_p: bool = False) -> None:
    for name, value in list(vars(holder).items()):
        if not isinstance(value, float) or not value > 0:
            continue
        if any(word in name.lower() for word in _WORDS) or (always_p and name == "p"):
            setattr(holder, name, 0.0)
            found[prefix + name] = value
