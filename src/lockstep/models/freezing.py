"""Parameters that are not trained: no gradient, no optimizer state."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lockstep.core.errors import ConfigError, Problem


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose qualified names match one of the patterns (`*`, `?`, `[...]`; `*` crosses dots).

    A tied parameter has several names; each of them freezes it.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
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
        raise ConfigError(Problem("", "model.freeze", f"{list(patterns)} freeze every parameter: nothing is left"))


def _matching(pattern: str, names: Sequence[str] | dict[str, nn.Parameter]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _no_match(pattern: str, names: list[str]) -> Problem:
    """Suggests the pattern that would match a whole module, if one was named, or the names most alike."""
    if whole := _matching(f"{pattern}.*", names):
        hint = f"did you mean {pattern + '.*'!r} ({len(whole)} parameters)?"
    elif near := difflib.get_close_matches(pattern, names, n=3, cutoff=0.3):
        hint = f"the nearest names: {', '.join(near)}"
    else:
        hint = f"the names begin with {', '.join(sorted({name.partition('.')[0] for name in names})[:8])}"
    return Problem("", "model.freeze", f"{pattern!r} matches none of the model's {len(names)} parameters; {hint}")
