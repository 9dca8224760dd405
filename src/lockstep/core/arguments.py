"""What the command line asks of a verb, beyond the config: flags that are about this one call, not about the run.

lockstep train RECIPE --json      ->  config (a run)  +  TrainArguments (a call)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TrainArguments:
    """`--ranks` is not here: it is short for `--launch.ranks` and stands in the config.

    Attributes:
        json: the last line on stdout is a JSON object.
        trust_remote_code: code that comes with a downloaded model may run.
    """

    json: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class EvaluateArguments:
    """Attributes:
    ranks: processes on this machine; auto: one a GPU, or one; None: as many as the run had.
    json: as in training.
    trust_remote_code: as in training.
    """

    ranks: int | Literal["auto"] | None = None
    json: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class GenerateArguments:
    """Attributes:
    tokens: new tokens at most.
    temperature: of the softmax; 0 takes the likeliest token.
    top_k: draw from so many of the likeliest tokens; None: from all.
    seed: of the draws.
    json: as in training.
    trust_remote_code: as in training.
    """

    tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 42
    json: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """Attributes:
    json: print the plan as a JSON object.
    trust_remote_code: as in training.
    """

    json: bool = False
    trust_remote_code: bool = False
