"""Records of jobs: what a launcher runs elsewhere, what it writes for that, and its state.

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
        words: What follows `lockstep`.
        restart_words: The same when the job restarts: without `--fresh`.
        typed: The whole command line as it was typed, for comments.
        name: A short name for the job.
        folder: Absolute path of the folder for the job's files.
        ranks: Ranks on each node, if the command says so.
        nodes: Whether it can run on several nodes.
        starts_run: Whether it starts or resumes a run, with a folder that all nodes share.
        sweep: The words that each run of a sweep adds; empty: one run.
        state_bytes: Estimated bytes of a checkpoint, if known.
        run_folder: As in the command, relative to where it runs or absolute.
        checkpoint_folder: Path or address, if it is in the config.
        paths: Local files and folders in the words or the config, except the run's.
        in_folder: Whether checkpoints are in a folder or at an address, not in a store that is an object.
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
        """Return the ranks on all hosts, if known; `ranks`: on each host without a number. Raises ConfigError."""


class SweepOptions:
    """Options of a launcher that submits the runs of a sweep as one job; others take no sweep."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The files that a launcher writes and the programs it executes to submit a job; `--dry-run` prints both.

    Attributes:
        files: Contents by absolute path.
        commands: Programs with their arguments, executed in this order.
        notes: Sentences that the user should read.
        attached: The job ends with this command, which therefore follows it.
        number: The job's identifier, if it is known before.
    """

    files: Mapping[Path, str]
    commands: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    attached: bool = False
    number: str = ""


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A submitted job: the launcher's identifier, and the folder of its files, if known."""

    number: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job: a line for a person, and the exit code once it has ended."""

    text: str
    code: int | None = None
