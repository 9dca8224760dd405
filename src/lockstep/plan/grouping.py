"""Which parameters share settings. Names and shapes are enough to know, so a mistake in a rule costs no process.

head.weight   [10, 64]   --> the first rule that matches, otherwise optim's own --> (lr_scale, weight_decay)
head.bias     [10]                                                                  one group for each pair
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lockstep.config.schema import Optim, ParameterRule
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import ParameterFacts


@dataclass(frozen=True, slots=True)
class Grouping:
    """Attributes:
    names: of the parameters, in the model's order.
    lr_scale: the group's learning rate is the run's times this.
    weight_decay: of the group.
    """

    names: tuple[str, ...]
    lr_scale: float
    weight_decay: float


def group_parameters(parameters: Sequence[ParameterFacts], optim: Optim) -> tuple[Grouping, ...]:
    """The trainable parameters in groups of equal settings, in the order of their first parameters.

    Raises:
        ConfigError: no parameter is trainable, or a rule matches none at all (frozen ones count as matched).
    """
    problems = [problem for index in range(len(optim.rules)) for problem in _unmatched(index, parameters, optim)]
    if problems:
        raise ConfigError(problems)
    settings: dict[tuple[float, float], list[str]] = {}
    for parameter in parameters:
        if parameter.trainable:
            settings.setdefault(_settings(parameter, optim), []).append(parameter.name)
    if not settings:
        raise ConfigError(_nothing_to_train(parameters))
    return tuple(Grouping(tuple(names), lr_scale, decay) for (lr_scale, decay), names in settings.items())


def is_hidden_matrix(parameter: ParameterFacts) -> bool:
    """Whether Muon updates it: a matrix between the layers, neither an embedding nor a head (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon). Told by its name, since a name is all that a plan knows."""
    if len(parameter.shape) != 2:
        return False
    parts = parameter.name.lower().split(".")
    return not any("embed" in part or part in _EMBEDDINGS_AND_HEADS for part in parts)


_EMBEDDINGS_AND_HEADS = frozenset(
    {"wte", "wpe", "shared", "lm_head", "head", "classifier", "score", "output_projection", "unembed", "decoder_head"}
)


def _settings(parameter: ParameterFacts, optim: Optim) -> tuple[float, float]:
    """lr_scale and weight decay."""
    decays = optim.decay == "all" or len(parameter.shape) >= 2
    weight_decay = optim.weight_decay if decays else 0.0
    for rule in optim.rules:
        if _matches(rule, parameter.name):
            return rule.lr_scale, weight_decay if rule.weight_decay is None else rule.weight_decay
    return 1.0, weight_decay


def _matches(rule: ParameterRule, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in rule.match)


def _unmatched(index: int, parameters: Iterable[ParameterFacts], optim: Optim) -> list[Problem]:
    rule = optim.rules[index]
    names = [parameter.name for parameter in parameters]
    if any(_matches(rule, name) for name in names):
        return []
    patterns = ", ".join(repr(pattern) for pattern in rule.match) or "an empty list"
    near = nearest_names(rule.match, names)
    hint = f"; the nearest names are {', '.join(near)}" if near else ""
    return [Problem("", f"optim.rules.{index}.match", f"no parameter's name matches {patterns}{hint}")]


def nearest_names(patterns: Iterable[str], names: Sequence[str], count: int = 3) -> list[str]:
    """Names that somebody who wrote these patterns may have meant."""
    found: list[str] = []
    for pattern in patterns:
        plain = pattern.replace("*", "").replace("?", "").strip(".")
        found += [name for name in names if plain and plain.lower() in name.lower()]
        found += difflib.get_close_matches(plain, names, n=count, cutoff=0.4)
    return list(dict.fromkeys(found or names))[:count]


def _nothing_to_train(parameters: Sequence[ParameterFacts]) -> Problem:
    if not parameters:
        return Problem("", "model", "the model has no parameters, so there is nothing to train")
    return Problem(
        "",
        "model.freeze",
        f"all {len(parameters)} parameters are frozen ({parameters[0].name}, ...), so there is nothing to train; "
        f"leave some out of the patterns",
    )
