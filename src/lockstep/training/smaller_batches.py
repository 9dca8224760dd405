"""Makes the micro-batches of a run smaller when memory runs out.

    round 1   batch.micro_size 8, accumulation 2    out of memory in update 13
    round 2   batch.micro_size 4, accumulation 4    update 13 again: the same samples, in the same order

Every launch begins with the sizes of its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError
from lockstep.launch.failure_kinds import was_killed
from lockstep.monitor.attempts import read_attempts
from lockstep.plan.batch import half
from lockstep.plan.plan import check_on_ranks

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.launch.ends import End
    from lockstep.training.job import Job

_MICRO_SIZE, _EVALUATION_SIZE = "batch.micro_size", "evaluation.micro_size"


@dataclass
class SmallerBatches:
    """The sizes of a launch's micro-batches, round after round.

    Attributes:
        job: The next round's.
        folder: Of the run.
        ranks: On all hosts.
    """

    job: Job
    folder: Path
    ranks: int
    _attempts: int = field(init=False)

    def __post_init__(self) -> None:
        self._attempts = len(read_attempts(self.folder))

    def after(self, end: End) -> str:
        """Let the next round need less memory after this end; return what changes, empty if nothing can."""
        sizes = self._too_large(end)
        changed = self._smaller(sizes)
        if changed is None:
            return ""
        self.job = replace(self.job, config=changed)
        listed = " and ".join(f"{key} is {half(size)} instead of {size}" for key, size in sizes.items())
        kept = ", and the global batch stays as it is" if _MICRO_SIZE in sizes else ""
        return f"{listed} from here on{kept}"

    def may_follow(self, end: End) -> bool:
        """Return whether the next round could need less memory after this end; change nothing."""
        return self._smaller(self._too_large(end)) is not None

    def _smaller(self, sizes: Mapping[str, int]) -> Config | None:
        """Return the config with half of these sizes; None: that isn't smaller, or the run doesn't work with it.

        Some settings need a whole update in one micro-batch, and batch norm more than one sample in each.
        """
        changed = self.job.config
        for key, size in sizes.items():
            name, _, option = key.partition(".")
            section = getattr(changed, name)
            current = getattr(section, option)
            if size > 1 and (current == "auto" or current >= size):
                changed = changed.model_copy(update={name: section.model_copy(update={option: half(size)})})
        micro_size, before = changed.batch.micro_size, self.job.config.batch.micro_size
        is_too_small = micro_size != "auto" and micro_size < (self._of_last_attempt("least_micro_size") or 1)
        if changed == self.job.config or (is_too_small and micro_size != before):
            return None
        try:
            check_on_ranks(changed, self.ranks)
        except ConfigError:
            return None
        return changed

    def _too_large(self, end: End) -> Mapping[str, int]:
        """Return the sizes with which memory ran out, by their keys; also after the kernel has killed a rank."""
        if end.too_large or not was_killed(end):
            return end.too_large
        is_evaluated = end.evaluates or end.evaluation_set is not None
        key, fact = (_EVALUATION_SIZE, "evaluation_size") if is_evaluated else (_MICRO_SIZE, "micro_size")
        size = self._of_last_attempt(fact)
        return {} if size is None else {key: size}

    def _of_last_attempt(self, fact: str) -> int | None:
        """Return a fact of the newest attempt of this launch; None if none had begun."""
        attempts = read_attempts(self.folder)
        number = attempts[-1].number(fact) if len(attempts) > self._attempts else None
        return None if number is None else int(number)
