"""Facts of each optimizer that plans and proofs need, one row each. `optim.optimizers` makes the optimizer itself.

          bytes of state, p a parameter's bytes        whole matrices     normalizes
adamw     2 p                                          no                 yes
sgd       p, with momentum                             no                 no
muon      p of a hidden matrix, otherwise as adamw     yes                yes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.plan.grouping import is_hidden_matrix

if TYPE_CHECKING:
    from lockstep.config.schema import Optim
    from lockstep.core.records import ParameterFacts

STEP_BYTES = 4  # a parameter's own count of updates, which torch keeps in fp32


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The facts of an optimizer that need no torch.

    Attributes:
        state_bytes: Returns the bytes that it keeps of a trained parameter; moments are in the parameter's precision.
        whole_matrices: It needs whole matrices on one rank, so that they can't be sharded.
        normalizes: Its step depends on a gradient's sign or on its ratio to its past, not on its size.
    """

    state_bytes: Callable[[ParameterFacts, Optim], int]
    whole_matrices: bool = False
    normalizes: bool = True


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


_UNKNOWN = OptimizerFacts(_two_moments)
"""A user's optimizer: as the most common ones."""

OPTIMIZERS = {
    "adamw": OptimizerFacts(_two_moments),
    "adam": OptimizerFacts(_two_moments),
    "sgd": OptimizerFacts(lambda parameter, optim: parameter.bytes if optim.momentum else 0, normalizes=False),
    "muon": OptimizerFacts(_muon, whole_matrices=True),
    "adafactor": OptimizerFacts(_factored, whole_matrices=True),
    "lion": OptimizerFacts(lambda parameter, optim: parameter.bytes),
    "custom": _UNKNOWN,
    "given": _UNKNOWN,
}
"""The facts of each value of `optim.name`."""
