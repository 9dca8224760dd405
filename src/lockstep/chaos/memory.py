"""Rounds in which memory runs out: compared with the run that is resumed with smaller micro-batches.

    undisturbed     1 2 3 4 5 6 7 8 ...       micro-batches of 8
    round           1 2 3 4 5 ! 6 7 8 ...     memory runs out in update 6; from then on micro-batches of 4
    reference               5 > 6 7 8 ...     resumed from an undisturbed run's state, with micro-batches of 4

Sums of smaller micro-batches are rounded in another order, so no run of the other size is bitwise equal. The reference
is; and the losses' distance from the undisturbed run shows that it is the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.every import Every
from lockstep.core.errors import RunFailed
from lockstep.monitor.attempts import read_attempts
from lockstep.resilience.faults import OOM, Fault
from lockstep.training.locations import find
from lockstep.training.resuming import Resume
from lockstep.training.smaller_batches import half

if TYPE_CHECKING:
    from lockstep.training.job import Job

PHASES = ("forward", "backward")
"""A rank that fails in its optimizer's step leaves an update that another rank has finished and not recorded."""
_EVERY_STATE = "every-state"


def in_memory(fault: Fault, phase: str, undisturbed: Path) -> Fault:
    """Return a fault of kind `oom`, after which micro-batches of half the size fit. Raises RunFailed if none can be."""
    size = _micro_size(undisturbed)
    if size < 2:
        why = "this run's have one sample; leave it out of --faults, or set a larger batch.micro_size"
        raise RunFailed(f"faults of kind {OOM} halve micro-batches, and {why}")
    return replace(fault, phase=phase, above=half(size))


def reference(job: Job, run: Path, train: Callable[[Job], int]) -> Path:
    """Train the run with which a round is compared; return its folder.

    Args:
        job: The round's, in the reference's folder.
        run: The round's folder.
        train: Returns the exit code.

    Raises:
        RunFailed: It failed.
    """
    folder = Path(job.config.run.folder or "")
    *_, last = read_attempts(run)
    resume = Resume()
    if last.step:
        kept = folder.with_name(_EVERY_STATE)
        if not kept.exists():
            _train(_changed(job, "checkpoint", every=Every(1, "steps"), keep_last=job.config.run.steps), kept, train)
        resume = Resume(step=last.step, origin=find(kept).storage)
    smaller = _changed(job, "batch", micro_size=_micro_size(run))
    _train(replace(smaller, resume=resume), folder, train)
    return folder


def distance(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """Return by what part of it a loss differs from the expected one, at most."""
    pairs = [(loss, expected[step]) for step, loss in losses.items() if step in expected]
    return max((abs(loss - other) / max(abs(other), 1e-30) for loss, other in pairs), default=0.0)


def _micro_size(run: Path) -> int:
    attempts = read_attempts(run)
    return int(attempts[-1].number("micro_size") or 1) if attempts else 1


def _changed(job: Job, section: str, **values: object) -> Job:
    changed = getattr(job.config, section).model_copy(update=values)
    return replace(job, config=job.config.model_copy(update={section: changed}))


def _train(job: Job, folder: Path, train: Callable[[Job], int]) -> None:
    code = train(_changed(job, "run", folder=str(folder)))
    if code:
        raise RunFailed(f"the run in {folder}, with which others are compared, ended with exit code {code}")
