"""What the command line asks of a verb, beyond the config: flags that are about this one call, not about the run.

lockstep train RECIPE --json      ->  config (a run)  +  TrainArguments (a call)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class TrainArguments:
    """`--ranks` is not here: it is short for `--launch.ranks` and stands in the config.

    Attributes:
        json: the last line on stdout is a JSON object.
        trust_remote_code: code that comes with a downloaded model may run.
        trust_run: code that the config of somebody else's run names may run.
        fresh: begin anew, whatever was saved before.
        step: go on from the checkpoint of this step; None: from the newest.
        origin: go on from a checkpoint of the run in this folder, as a run of its own.
        accept_changes: go on although data, model or seed are others than before.
    """

    json: bool = False
    trust_remote_code: bool = False
    trust_run: bool = False
    fresh: bool = False
    step: int | None = None
    origin: Path | None = None
    accept_changes: bool = False


@dataclass(frozen=True, slots=True)
class EvaluateArguments:
    """Attributes:
    ranks: processes on this machine; auto: one a GPU, or one; None: as many as the run had.
    json: as in training.
    trust_remote_code: as in training.
    trust_run: as in training.
    """

    ranks: int | Literal["auto"] | None = None
    json: bool = False
    trust_remote_code: bool = False
    trust_run: bool = False


@dataclass(frozen=True, slots=True)
class GenerateArguments:
    """Attributes:
    tokens: new tokens at most.
    temperature: of the softmax; 0 takes the likeliest token.
    top_k: draw from so many of the likeliest tokens; None: from all.
    seed: of the draws.
    json: as in training.
    trust_remote_code: as in training.
    trust_run: as in training.
    """

    tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 42
    json: bool = False
    trust_remote_code: bool = False
    trust_run: bool = False


@dataclass(frozen=True, slots=True)
class ExportArguments:
    """Attributes:
    step: of the checkpoint; None: the newest that verifies, or the best if the run is to end with it.
    best: the one with the best metric.
    to: a folder, or a file whose suffix says the format; None: in the run's folder.
    format: auto: hf for a Hugging Face model, otherwise safetensors.
    force: replace what is there.
    trust_remote_code: as in training; for `hf`.
    trust_run: as in training; for `hf`.
    """

    step: int | None = None
    best: bool = False
    to: Path | None = None
    format: Literal["auto", "safetensors", "torch", "hf"] = "auto"
    force: bool = False
    trust_remote_code: bool = False
    trust_run: bool = False


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """Attributes:
    json: print the plan as a JSON object.
    trust_remote_code: as in training.
    memory: bytes that each rank has; None: as many as it would have on this machine.
    """

    json: bool = False
    trust_remote_code: bool = False
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryArguments:
    """Attributes:
    modes: names with commas between them, or `all`.
    steps: updates of each that are timed.
    json: as in training; an object a mode.
    trust_remote_code: as in training.
    """

    modes: str = "all"
    steps: int = 5
    json: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class VerifyArguments:
    """Attributes:
    strategies: names with commas between them, or `all`.
    ranks: numbers of processes to try each on.
    steps: updates of each run.
    precision: of forward and backward.
    html: where to write the page; None: runs/verify-RECIPE.html.
    json: as in training; a list of rows.
    trust_remote_code: as in training.
    """

    strategies: str = "all"
    ranks: tuple[int, ...] = (1, 2, 4)
    steps: int = 8
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    html: Path | None = None
    json: bool = False
    trust_remote_code: bool = False
