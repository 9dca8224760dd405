"""The settings under which a run recovers from bad numbers, for the rounds of `lockstep chaos`.

nan        recovery.bad_numbers.nonfinite: retry       the update is repeated
badsample  recovery.bad_numbers.nonfinite: rollback    the run goes back, and leaves samples out; so does the run with
                                                       which it is compared, from the start
diverge    recovery.compare_every: 1                   the copies are compared, and ranks start again
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.reading import read_manifest
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.data.bad_samples import BAD_NUMBERS
from lockstep.resilience.number_faults import BAD_SAMPLE
from lockstep.training.ledger import left_out_in
from lockstep.training.locations import choose, find

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.job import Job

_ROLLBACK_STEPS = 2


def prepared(config: Config, kinds: Collection[str], ranks: int) -> Config:
    """Return the config with what the kinds of faults need.

    Raises:
        ConfigError: A single rank has no copy that could differ.
    """
    recovery = config.recovery
    numbers: dict[str, object] = {}
    if "nan" in kinds:
        numbers = {"nonfinite": "retry", "bisect": recovery.bad_numbers.bisect or BAD_SAMPLE in kinds}
    elif BAD_SAMPLE in kinds and not (recovery.bad_numbers.bisect or recovery.bad_numbers.nonfinite == "rollback"):
        numbers = {"nonfinite": "rollback", "rollback_steps": _ROLLBACK_STEPS}
    if numbers:
        recovery = recovery.model_copy(update={"bad_numbers": recovery.bad_numbers.model_copy(update=numbers)})
    if "diverge" in kinds:
        if ranks == 1:
            raise ConfigError("--faults diverge changes one of several copies of a parameter; start 2 ranks at least")
        recovery = recovery.model_copy(update={"compare_every": 1})
    return config.model_copy(update={"recovery": recovery})


def reference(job: Job, run: Path, train: Callable[[Job], int]) -> Path:
    """Train the run with which a round with a bad sample is compared; return its folder.

    Args:
        job: The round's, in the reference's folder.
        run: The round's folder.
        train: Returns the exit code.

    Raises:
        RunFailed: It failed.
    """
    place = find(run)
    state = read_manifest(place.storage, choose(place, None)).state
    listed = left_out_in(state.get("left_out", ()))
    samples = sorted({sample.index for sample in listed if sample.reason.startswith(BAD_NUMBERS)})
    ranges = (*job.config.data.leave_out, *((sample, sample) for sample in samples))
    data = job.config.data.model_copy(update={"leave_out": ranges})
    folder = Path(job.config.run.folder or "")
    if code := train(replace(job, config=job.config.model_copy(update={"data": data}))):
        raise RunFailed(f"the run in {folder}, with which others are compared, ended with exit code {code}")
    return folder
