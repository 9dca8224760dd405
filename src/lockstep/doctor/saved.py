"""The newest state of a run that is saved somewhere, and the command that resumes from it.

RUN/checkpoints, or checkpoint.folder     its checkpoints
the memory of this host                   what its launcher has left there
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.storage import names_by_step
from lockstep.core.command_lines import command_line
from lockstep.core.errors import Failure
from lockstep.launch.memory_folder import left_by
from lockstep.monitor.folder import ENVIRONMENT
from lockstep.report.run_data import RunData
from lockstep.training.finished_run import run_config
from lockstep.training.locations import storage_of
from lockstep.training.memory_snapshots import snapshots_in

_OF_HOSTS = ("--nodes", "--rendezvous", "--job-id", "--ranks")
"""Flags that a resumed run needs again: its config has what the others set."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The newest saved state of a run.

    Attributes:
        note: What is saved where.
        resume: The command that resumes from it; empty: there is nothing to resume.
    """

    note: str
    resume: str = ""


def saved_state(run: Path, data: RunData) -> SavedState:
    """Return where the newest state of a run that has ended is, and how it is resumed."""
    own = max(_steps(run), default=None) if (run / ENVIRONMENT).exists() else None
    if own is None:
        own = max((save.step for save in data.saves if save.failure is None), default=None)
    memory = left_by(run)
    in_memory = max(names_by_step(snapshots_in(memory, None).names()), default=-1) if memory is not None else -1
    if in_memory > (-1 if own is None else own):
        return SavedState(
            f"The state after step {in_memory:,} is in this host's memory, in {memory}.", _resume(run, data)
        )
    if own is None:
        return SavedState("No checkpoint exists: the run starts from the beginning.", _resume(run, data))
    return SavedState(f"The newest checkpoint is that of step {own:,}.", _resume(run, data))


def _resume(run: Path, data: RunData) -> str:
    return command_line("lockstep", "train", run, *_flags_of_hosts(data))


def _flags_of_hosts(data: RunData) -> list[str]:
    """Return the flags of the recorded command line by which several hosts met; none if it was one host."""
    typed = data.environment.get("command_line")
    words = [word for word in typed if isinstance(word, str)] if isinstance(typed, list) else []
    if not any(word.partition("=")[0] == "--nodes" for word in words):
        return []
    flags = []
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in _OF_HOSTS:
            flags += [word] if equals else words[number : number + 2]
    return flags


def _steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints; none if they can't be listed."""
    with suppress(Failure, OSError):
        return [*names_by_step(storage_of(run_config(run).checkpoint, run).names())]
    return []
