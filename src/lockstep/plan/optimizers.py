"""Facts of each optimizer that plans and proofs need, one row each. `optim.optimizers` makes the optimizer itself.

            bytes of state, p a parameter's bytes        looks at whole matrices    normalizes
adamw       2 p                                          no                         yes
sgd         p, with momentum                             no                         no
muon        p of a hidden matrix, otherwise as adamw     yes                        yes
adafactor   a row and a column of each matrix            yes                        yes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.plan.grouping import is_hidden_matrix

if TYPE_CHECKING:
    from lockstep.config.schema import Optim
    from lockstep.core.records import ParameterFacts

STEP_BYTES = 4  # a parameter's own count of updates, which torch keeps in fp32


ParameterBytes = Callable[["ParameterFacts", "Optim"], int]


def _none(parameter: ParameterFacts, optim: Optim) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The facts of an optimizer that need no torch.

    Attributes:
        state_bytes: Returns the bytes that it keeps of a trained parameter; moments are in the parameter's precision.
        whole_matrices: Its step depends on whole matrices, so that a strategy that shards them must support it.
        factors: Entries of its state that have one element along a dim of a matrix: that dim, from the end.
        unsharded_bytes: Returns those of `state_bytes` that each of the ranks holds that shard a parameter's rows.
        exchanged: Returns the elements of a parameter that such ranks exchange: each travels to another rank and back,
            in the precision in which the run computes.
        summed_bytes: Returns the bytes that such ranks sum.
        normalizes: Its step depends on a gradient's sign or on its ratio to its past, not on its size.
    """

    state_bytes: ParameterBytes
    whole_matrices: bool = False
    normalizes: bool = True
    factors: Mapping[str, int] = field(default_factory=dict)
    unsharded_bytes: ParameterBytes = _none
    exchanged: ParameterBytes = _none
    summed_bytes: ParameterBytes = _none


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


def _columns(parameter: ParameterFacts, optim: Optim) -> int:
    """Return the bytes of the column factor of one matrix: it is the sum over the rows of all ranks."""
    return parameter.shape[1] * parameter.element_bytes if len(parameter.shape) == 2 else 0


def _orthogonalized(parameter: ParameterFacts, optim: Optim) -> int:
    return parameter.elements if is_hidden_matrix(parameter) else 0


def _factor_sums(parameter: ParameterFacts, optim: Optim) -> int:
    """Return the bytes of the sums of squares of a parameter and its update, and of a matrix's columns and rows."""
    of_matrix = parameter.shape[1] + 1 if len(parameter.shape) == 2 else 0
    return (2 + of_matrix) * parameter.element_bytes


_UNKNOWN = OptimizerFacts(_two_moments)
"""A user's optimizer: as the most common ones."""

OPTIMIZERS = {
    "adamw": OptimizerFacts(_two_moments),
    "adam": OptimizerFacts(_two_moments),
    "sgd": OptimizerFacts(lambda parameter, optim: parameter.bytes if optim.momentum else 0, normalizes=False),
    "muon": OptimizerFacts(_muon, whole_matrices=True, exchanged=_orthogonalized),
    "adafactor": OptimizerFacts(
        _factored,
        whole_matrices=True,
        factors={"row_var": -1, "col_var": -2},
        unsharded_bytes=_columns,
        summed_bytes=_factor_sums,
    ),
    "lion": OptimizerFacts(lambda parameter, optim: parameter.bytes),
    "custom": _UNKNOWN,
    "given": _UNKNOWN,
}
"""The facts of each value of `optim.name`."""
