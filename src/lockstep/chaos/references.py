"""The reference runs of rounds that end with smaller micro-batches or fewer samples.

undisturbed     1 2 3 4 5 6 7 8 ...       2 ranks, micro-batches of 8
round           1 2 3 4 5 ! 6 7 8 ...     in update 6 memory runs out
reference               5 > 6 7 8 ...     resumed from an undisturbed run's state, likewise: bitwise equal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.reading import read_manifest
from lockstep.config.every import Every
from lockstep.core.errors import RunFailed
from lockstep.data.bad_samples import BAD_NUMBERS
from lockstep.loop.ledger import left_out_in
from lockstep.monitor.attempts import read_attempts
from lockstep.plan.batch import half
from lockstep.resilience.faults import OOM
from lockstep.resilience.number_faults import NAN
from lockstep.resuming.locations import choose, find
from lockstep.resuming.resuming import Resume

if TYPE_CHECKING:
    from lockstep.training.job import Job

_EVERY_STATE = "every-state"


def half_of(undisturbed: Path) -> int:
    """Return half of a run's micro-batch; 0 if it has one sample."""
    size = _micro_size(undisturbed)
    return half(size) if size > 1 else 0


def needs_one(kind: str, run: Path, undisturbed: Path) -> bool:
    """Return whether a round ends on other sums: not if memory ran out in an evaluation."""
    if kind == OOM:
        return _micro_size(run) != _micro_size(undisturbed)
    return kind == NAN


def reference(kind: str, job: Job, run: Path, train: Callable[[Job], int]) -> Path:
    """Train the reference run of a round; return its folder. Raises RunFailed.

    Args:
        kind: Of the round's fault.
        job: The round's, in the reference's folder.
        run: The round's folder.
        train: Trains a job, and returns the exit code.
    """
    folder = Path(job.config.run.folder or "")
    *_, last = read_attempts(run)
    resume = Resume()
    if last.step:
        kept = folder.parents[1] / _EVERY_STATE / folder.name
        if not kept.exists():
            kept.parent.mkdir()
            whole = _changed(job, "checkpoint", every=Every(1, "steps"), keep_last=job.config.run.steps)
            _train(_changed(whole, "run", folder=str(kept)), train)
        resume = Resume(step=last.step, origin=find(kept).storage, accept_changes=kind == NAN)
    folder.parent.mkdir()
    if kind == OOM:
        job = _changed(job, "batch", micro_size=_micro_size(run))
    if kind == NAN:
        job = _changed(job, "data", leave_out=(*job.config.data.leave_out, *left_out(run)))
    _train(replace(job, resume=resume), train)
    return folder


def distance(losses: Mapping[Any, float | None], expected: Mapping[Any, float | None]) -> float:
    """Return by what part of it a loss differs from the expected one, at most; None: an update without a sample."""
    both = [(loss, expected.get(step)) for step, loss in losses.items()]
    pairs = [(loss, other) for loss, other in both if loss is not None and other is not None]
    return max((abs(loss - other) / max(abs(other), 1e-30) for loss, other in pairs), default=0.0)


def left_out(run: Path) -> list[tuple[int, int]]:
    """Return the samples that a run has left out because of their numbers, as ranges."""
    place = find(run)
    listed = left_out_in(read_manifest(place.storage, choose(place, None)).state.get("left_out", ()))
    samples = sorted({sample.index for sample in listed if sample.reason.startswith(BAD_NUMBERS)})
    return [(sample, sample) for sample in samples]


def _micro_size(run: Path) -> int:
    attempts = read_attempts(run)
    return int(attempts[-1].number("micro_size") or 1) if attempts else 1


def _changed(job: Job, section: str, **values: object) -> Job:
    return replace(job, config=job.config.with_values(**{section: values}))


def _train(job: Job, train: Callable[[Job], int]) -> None:
    if code := train(job):
        raise RunFailed(f"the reference run in {job.config.run.folder} ended with exit code {code}")
