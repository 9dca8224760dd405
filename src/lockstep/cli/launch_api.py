"""Launching from Python: the same checks, jobs and records as `lockstep launch`.

lockstep.submit("slurm", ["train", "digits"], nodes=2)    lockstep launch slurm --nodes 2 train digits
lockstep.find_job("slurm", "runs/a").status()             lockstep launch slurm status runs/a
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from lockstep.cli.arguments import collected_notes
from lockstep.cli.launch_jobs import SubmittedJob, find_jobs, plan_jobs, submit_jobs
from lockstep.cli.launch_values import command_words, job_text, option_values, sweep_texts
from lockstep.cli.section_flags import validated
from lockstep.core.errors import Problem
from lockstep.core.terminal import echo, shortened
from lockstep.launchers.registry import find_launcher


def submit(
    where: str, command: Sequence[object], *, sweep: Mapping[str, Sequence[object]] | None = None, **options: object
) -> SubmittedJob:
    """Check a command line, submit it to a launcher, and return the job.

    Args:
        where: The launcher's name, or `module:Name` of your own.
        command: The words of the command from its verb on, such as `["train", "digits", "--ranks", 2]`.
        sweep: Values by key: one run is trained for each of them, or for each combination.
        **options: The launcher's options, as its flags with underscores: `nodes=2`, `gpus_per_node=8`.

    Returns:
        The job, with `status()`, `follow()` and `cancel()`. One that runs as long as this process, as by ssh, has to be
        followed.

    Raises:
        ConfigError: The command or the options can't work, or this run has a job already.
        RunFailed: The launcher can't be reached, or refuses the job.
    """
    launcher = find_launcher(where)
    words, texts = command_words(command), sweep_texts(sweep)
    values = option_values(where, launcher.options, options)
    given = {name: Problem("", name, shortened(options[name])) for name in values}
    section = validated(launcher.options, values, given)
    typed = [*_flags(launcher.options, values), *(f"--sweep={text}" for text in texts), *words]
    with collected_notes() as notes:
        planned = plan_jobs(where, launcher, section, texts, typed, words)
    for note in [*notes, *(f"note: {note}" for note in planned.notes)]:
        echo(note, file=sys.stderr)
    return submit_jobs(planned)


def find_job(where: str, job: str | int | Path) -> SubmittedJob:
    """Return a job that was submitted before, in this process or another one.

    Args:
        where: The launcher's name.
        job: Its identifier, or the folder of its run or sweep.

    Raises:
        ConfigError: There is no such launcher, or no job was launched for that folder by it.
    """
    return find_jobs(where, find_launcher(where), job_text(job))


def _flags(section: type[BaseModel], options: Mapping[str, object]) -> Iterator[str]:
    """Yield the options as flags of the command line, for comments."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            if value != section.model_fields[name].default:
                yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield from (f"--{flag}={each}" for each in (value if isinstance(value, tuple) else (value,)))
