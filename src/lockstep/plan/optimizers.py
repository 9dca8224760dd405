"""Groups parameters by their optimizer settings, and has the facts of each optimizer. Names and shapes suffice.

            bytes of state, p a parameter's bytes        needs whole matrices       normalizes
adamw       2 p                                          no                         yes
sgd         p, with momentum                             no                         no
muon        p of a hidden matrix, otherwise as adamw     yes                        yes
adafactor   a row and a column of each matrix            yes                        yes
adamw-8bit  two bytes an element, and their scales       yes                        yes
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lockstep.config.schema import Optim, ParameterRule
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import ParameterFacts


@dataclass(frozen=True, slots=True)
class Grouping:
    """A parameter group: names in the model's order, factor on the learning rate, and weight decay."""

    names: tuple[str, ...]
    lr_scale: float
    weight_decay: float


def group_parameters(parameters: Sequence[ParameterFacts], optim: Optim) -> tuple[Grouping, ...]:
    """Return the trainable parameters in groups of equal settings.

    Raises:
        ConfigError: No parameter is trainable, or a rule matches none (frozen ones count as matched).
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
    if not settings:
        why = f"none of the model's {len(parameters)} parameters is left to train; remove patterns"
        raise ConfigError(
            Problem("", "model.freeze", why) if parameters else Problem("", "model", "it has no parameters")
        )
    return tuple(Grouping(tuple(names), lr_scale, decay) for (lr_scale, decay), names in settings.items())


def is_hidden_matrix(parameter: ParameterFacts) -> bool:
    """Return whether Muon updates it: a matrix that isn't an embedding or a head, by its name.

    (Jordan et al. 2024, kellerjordan.github.io/posts/muon)
    """
    if len(parameter.shape) != 2:
        return False
    parts = parameter.name.lower().split(".")
    return not any("embed" in part or part in _EMBEDDINGS_AND_HEADS for part in parts)


_EMBEDDINGS_AND_HEADS = frozenset(
    {"wte", "wpe", "shared", "lm_head", "head", "classifier", "score", "output_projection", "unembed", "decoder_head"}
)


def _settings(parameter: ParameterFacts, optim: Optim) -> tuple[float, float]:
    decays = optim.decay == "all" or len(parameter.shape) >= 2
    weight_decay = optim.weight_decay if decays else 0.0
    for rule in optim.rules:
        if _matches(rule, parameter.name):
            return rule.lr_scale, weight_decay if rule.weight_decay is None else rule.weight_decay
    return 1.0, weight_decay


def _matches(rule: ParameterRule, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in rule.match)


def _unmatched(index: int, patterns: Sequence[str], names: Sequence[str]) -> Problem:
    plain = [pattern.strip("*.?") for pattern in patterns]
    near = [name for name in names if any(word and word.lower() in name.lower() for word in plain)]
    near += [match for word in plain for match in difflib.get_close_matches(word, names, n=3, cutoff=0.4)]
    shown = ", ".join(map(repr, patterns)) or "an empty list"
    hint = f"; the nearest names are {', '.join(list(dict.fromkeys(near or names))[:3])}" if names else ""
    return Problem("", f"optim.rules.{index}.match", f"no parameter's name matches {shown}{hint}")


STEP_BYTES = 4  # a parameter's own count of updates, which torch keeps in fp32


ParameterBytes = Callable[[ParameterFacts, Optim], int]


def _none(parameter: ParameterFacts, optim: Optim) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The facts of an optimizer that need no torch.

    Attributes:
        state_bytes: Of a trained parameter; moments are in the parameter's precision.
        whole_matrices: Its step depends on whole matrices.
        factors: Entries of its state that have one element along a dim of a matrix: that dim, from the end.
        unsharded_bytes: The part of `state_bytes` that each rank holds when rows are sharded.
        normalizes: Its step depends on a gradient's sign or its ratio to its past, not on its size.
    """

    state_bytes: ParameterBytes
    whole_matrices: bool = False
    normalizes: bool = True
    factors: Mapping[str, int] = field(default_factory=dict)
    unsharded_bytes: ParameterBytes = _none


def _two_moments(parameter: ParameterFacts, optim: Optim) -> int:
    return 2 * parameter.bytes + STEP_BYTES


def _muon(parameter: ParameterFacts, optim: Optim) -> int:
    return parameter.bytes if is_hidden_matrix(parameter) else _two_moments(parameter, optim)


def _factored(parameter: ParameterFacts, optim: Optim) -> int:
    """Return the bytes of a row and a column per matrix (Shazeer & Stern 2018, arXiv:1804.04235, section 3)."""
    if len(parameter.shape) < 2:
        return parameter.bytes + STEP_BYTES
    rows, columns = parameter.shape[-2:]
    return math.prod(parameter.shape[:-2]) * (rows + columns) * parameter.element_bytes + STEP_BYTES


def _eight_bits(parameter: ParameterFacts, optim: Optim) -> int:
    """Return the bytes of two moments in 8 bits, with a scale for each 256 elements and their two code books."""
    if parameter.elements < 4096:
        return 2 * parameter.bytes
    return 2 * (parameter.elements + 4 * -(-parameter.elements // 256) + 1024)


def _columns(parameter: ParameterFacts, optim: Optim) -> int:
    """Return the bytes of the column factor of one matrix, a sum over the rows of all ranks."""
    return parameter.shape[1] * parameter.element_bytes if len(parameter.shape) == 2 else 0


_UNKNOWN = OptimizerFacts(_two_moments)
"""A user's optimizer: as the most common ones."""

OPTIMIZERS = {
    "adamw": OptimizerFacts(_two_moments),
    "adam": OptimizerFacts(_two_moments),
    "sgd": OptimizerFacts(lambda parameter, optim: parameter.bytes if optim.momentum else 0, normalizes=False),
    "muon": OptimizerFacts(_muon, whole_matrices=True),
    "adafactor": OptimizerFacts(
        _factored,
        whole_matrices=True,
        factors={"row_var": -1, "col_var": -2},
        unsharded_bytes=_columns,
    ),
    "adamw-8bit": OptimizerFacts(_eight_bits),
    "schedule-free": OptimizerFacts(lambda parameter, optim: 2 * parameter.bytes),
    "lion": OptimizerFacts(lambda parameter, optim: parameter.bytes),
    "custom": _UNKNOWN,
    "given": _UNKNOWN,
}
"""The facts of each value of `optim.name`."""
