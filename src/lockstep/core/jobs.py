"""Records of jobs: what a launcher is to run elsewhere, what it would write for that, and the state of it.

lockstep launch slurm --nodes 2 train digits    JobCommand --> Launcher.plan --> LaunchPlan --> submit --> LaunchedJob
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

JOB_FILES = "launch"
"""The subfolder of a run's folder that launchers write to."""


@dataclass(frozen=True, slots=True)
class JobCommand:
    """A command line of Lockstep that a launcher runs elsewhere. It has been checked.

    Attributes:
        words: What follows `lockstep`, from the verb on.
        restart_words: The same when the job starts again: without `--fresh`, which would discard what was saved.
        typed: The whole command line as it was typed, for comments.
        name: A short name for the job.
        folder: Absolute path of the folder for the job's files.
        ranks: Ranks on each node, if the command states them.
        nodes: Whether it can run on several nodes.
        starts_run: Whether it starts or resumes a run, whose folder all nodes share.
        sweep: The words that each run of a sweep adds; empty: one run.
        state_bytes: Estimated bytes of a checkpoint; None: unknown.
        run_folder: Folder of the run as the command names it, relative to where it runs or absolute.
        checkpoint_folder: Path or address of the checkpoints, if the config names it.
        paths: Files and folders here that the words or the config name, as they name them; not those of the run.
        in_folder: Whether checkpoints are in a folder, or at an address, and not in a store that is an object.
    """

    words: tuple[str, ...]
    restart_words: tuple[str, ...]
    typed: str
    name: str
    folder: Path
    ranks: int | None = None
    nodes: bool = False
    starts_run: bool = False
    sweep: tuple[tuple[str, ...], ...] = ()
    state_bytes: int | None = None
    run_folder: Path = Path()
    checkpoint_folder: str | None = None
    paths: tuple[str, ...] = ()
    in_folder: bool = True


class HostOptions(ABC):
    """Options of a launcher that name hosts, each with its own number of ranks."""

    @abstractmethod
    def world_size(self, ranks: int | None) -> int | None:
        """Return the number of ranks on all hosts; None if it isn't known. Raises ConfigError.

        Args:
            ranks: Ranks on each host for which the options don't state it, if the command states them.
        """


class SweepOptions:
    """Options of a launcher that submits the runs of a sweep as one job; others take no sweep."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The files that a launcher writes and the programs it executes to submit a job; `--dry-run` prints both.

    Attributes:
        files: Contents by absolute path.
        commands: Programs with their arguments, executed in this order once the files are written.
        notes: Sentences that the user should read.
        attached: Whether the job ends with this command, which therefore follows it.
        number: The job's identifier, if it is known before; the job is remembered before it is submitted then.
    """

    files: Mapping[Path, str]
    commands: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    attached: bool = False
    number: str = ""


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A submitted job.

    Attributes:
        number: The launcher's identifier.
        folder: The folder of its files; None if only the identifier is known.
    """

    number: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job.

    Attributes:
        text: A line for a person.
        code: Exit code as of `lockstep train`; None while it has not ended.
    """

    text: str
    code: int | None = None
