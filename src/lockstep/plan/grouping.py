"""Groups parameters by their optimizer settings. Names and shapes suffice, so a plan finds mistakes in the rules.

head.weight   [10, 64]   --> the first rule that matches, otherwise optim's own --> (lr_scale, weight_decay)
head.bias     [10]                                                                  one group for each pair
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lockstep.config.schema import Optim, ParameterRule
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import ParameterFacts


@dataclass(frozen=True, slots=True)
class Grouping:
    """A parameter group.

    Attributes:
        names: Parameters, in the model's order.
        lr_scale: Factor on the run's learning rate.
    """

    names: tuple[str, ...]
    lr_scale: float
    weight_decay: float


def group_parameters(parameters: Sequence[ParameterFacts], optim: Optim) -> tuple[Grouping, ...]:
    """Return the trainable parameters in groups of equal settings, in the order of their first parameters.

    Raises:
        ConfigError: No parameter is trainable, or a rule matches none at all (frozen ones count as matched).
    """
    names = [parameter.name for parameter in parameters]
    problems = [
        _unmatched(index, rule.match, names)
        for index, rule in enumerate(optim.rules)
        if not any(_matches(rule, name) for name in names)
    ]
    if problems:
        raise ConfigError(problems)
    settings: dict[tuple[float, float], list[str]] = {}
    for parameter in parameters:
        if parameter.trainable:
            settings.setdefault(_settings(parameter, optim), []).append(parameter.name)
    if not settings and parameters:
        why = (
            f"all {len(parameters)} parameters are frozen ({parameters[0].name}, ...), so there is nothing to train; "
            "remove patterns from it"
        )
        raise ConfigError(Problem("", "model.freeze", why))
    if not settings:
        raise ConfigError(Problem("", "model", "the model has no parameters, so there is nothing to train"))
    return tuple(Grouping(tuple(names), lr_scale, decay) for (lr_scale, decay), names in settings.items())


def is_hidden_matrix(parameter: ParameterFacts) -> bool:
    """Return whether Muon updates it: a matrix between the layers, neither an embedding nor a head.

    The name decides, since a plan knows nothing else (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
    """
    if len(parameter.shape) != 2:
        return False
    parts = parameter.name.lower().split(".")
    return not any("embed" in part or part in _EMBEDDINGS_AND_HEADS for part in parts)


_EMBEDDINGS_AND_HEADS = frozenset(
    {"wte", "wpe", "shared", "lm_head", "head", "classifier", "score", "output_projection", "unembed", "decoder_head"}
)


def _settings(parameter: ParameterFacts, optim: Optim) -> tuple[float, float]:
    """Return lr_scale and weight decay."""
    decays = optim.decay == "all" or len(parameter.shape) >= 2
    weight_decay = optim.weight_decay if decays else 0.0
    for rule in optim.rules:
        if _matches(rule, parameter.name):
            return rule.lr_scale, weight_decay if rule.weight_decay is None else rule.weight_decay
    return 1.0, weight_decay


def _matches(rule: ParameterRule, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in rule.match)


def _unmatched(index: int, patterns: Sequence[str], names: Sequence[str]) -> Problem:
    near: list[str] = []
    for pattern in patterns:
        plain = pattern.replace("*", "").replace("?", "").strip(".")
        near += [name for name in names if plain and plain.lower() in name.lower()]
        near += difflib.get_close_matches(plain, names, n=3, cutoff=0.4)
    nearest = list(dict.fromkeys(near or names))[:3]
    hint = f"; the nearest names are {', '.join(nearest)}" if nearest else ""
    shown = ", ".join(repr(pattern) for pattern in patterns) or "an empty list"
    return Problem("", f"optim.rules.{index}.match", f"no parameter's name matches {shown}{hint}")
