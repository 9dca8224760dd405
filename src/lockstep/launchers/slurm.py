"""Runs a command as a batch job of Slurm.

plan      the script, and `sbatch` of it                     submit    sbatch
status    scontrol show job, or sacct once it is forgotten   cancel    scancel
follow    the output file while the job is known, then the exit code that the script ended with
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.core.errors import ConfigError, RunFailed, Stopped
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.terminal import echo
from lockstep.launchers.slurm_script import SlurmOptions, check, notes, script
from lockstep.launchers.tools import OutputTail, execute, write_files

_NOT_HERE = "call this where Slurm's commands are, such as a login node; --dry-run prints the script anywhere"
_REMEDIES = {
    "partition": "`sinfo -s` lists the partitions",
    "account": "`sacctmgr show associations user=$USER` lists your accounts and qualities of service",
    "qos": "`sacctmgr show associations user=$USER` lists your accounts and qualities of service",
    "node configuration": "`sinfo -o '%P %D %c %m %G %f'` lists what the nodes have",
}
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_POLL_S = 0.5
_ASK_S = 2.0  # between questions to the controller, which many users share
_LATE_OUTPUT_S = 1.0  # a shared folder may show the last lines late


class SlurmLauncher:
    """The launcher `slurm`."""

    options = SlurmOptions

    def plan(self, command: JobCommand, options: SlurmOptions) -> LaunchPlan:
        """Return the script and the command that submits it."""
        check(command, options)
        path = command.folder / "job.sh"
        submits = (("sbatch", "--parsable", str(path)),)
        return LaunchPlan({path: script(command, options, Path.cwd())}, submits, tuple(notes(command, options)))

    def submit(self, plan: LaunchPlan) -> str:
        """Write the script and submit it; return the job's number."""
        execute(("sbatch", "--version"), _NOT_HERE)
        write_files(plan.files)
        number = ""
        for words in plan.commands:
            number = _asked(words).strip().split(";")[0]  # JOB;CLUSTER where there are several clusters
        return number

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the state of a job, or of all runs of a sweep."""
        tasks = _tasks(job.number)
        return JobStatus("\n".join(_line(task) for task in tasks), _code(tasks))

    def follow(self, job: LaunchedJob) -> int:
        """Print the job's output and its changes of state until it has ended."""
        tasks = _tasks(job.number)
        tail = OutputTail(_pattern(tasks))
        shown, asked_at = "", time.monotonic()
        while True:
            text = "\n".join(_line(task) for task in tasks)
            tail.print_new()
            if text != shown:
                shown = text
                echo(text, file=sys.stderr, flush=True)
            if (code := _code(tasks)) is not None:
                time.sleep(_LATE_OUTPUT_S)
                tail.print_new()
                return code
            time.sleep(_POLL_S)
            if time.monotonic() - asked_at >= _ASK_S:
                tasks, asked_at = _tasks(job.number), time.monotonic()

    def cancel(self, job: LaunchedJob) -> None:
        """Cancel the job: Slurm sends SIGTERM to its processes, so the ranks save as far as Slurm's KillWait allows."""
        if self.status(job).code is not None:
            raise ConfigError(f"Slurm job {job.number} has ended already: {self.status(job).text}")
        _asked(("scancel", job.number))


SLURM = SlurmLauncher()


def _asked(words: Sequence[str]) -> str:
    """Execute one of Slurm's commands. Raises RunFailed, with a remedy if it is a frequent mistake."""
    try:
        return execute(words, _NOT_HERE)
    except RunFailed as failure:
        text = str(failure)
        remedy = next(
            (
                remedy
                for word, remedy in _REMEDIES.items()
                if re.search(rf"[Ii]nvalid.*{word}|{word}.*not available", text)
            ),
            None,
        )
        raise RunFailed(f"{text}; {remedy}" if remedy else text) from None


# --- what Slurm knows of a job --------------------------------------------------------------------------------------


def _tasks(number: str) -> list[Mapping[str, str]]:
    """Return the fields of a job, or of each task of an array. Raises ConfigError: there is no such job."""
    if not re.fullmatch(r"\d+(_\d+)?", number):
        raise ConfigError(
            f"{number!r} is neither the number of a Slurm job nor the folder of a run that Slurm was given"
        )
    try:
        text = execute(("scontrol", "--oneliner", "show", "job", number), _NOT_HERE)
    except RunFailed as failure:
        if "Invalid job id" not in str(failure):
            raise
        return _accounted(number)
    return [dict(re.findall(r"(\w+(?:/\w+)?)=(\S*)", line)) for line in text.splitlines() if "JobId=" in line]


def _accounted(number: str) -> list[Mapping[str, str]]:
    """Return the same of a job that the controller has forgotten, minutes after its end."""
    fields = ("JobId", "JobState", "ExitCode", "NodeList")
    columns = "JobID,State,ExitCode,NodeList"
    try:
        text = execute(("sacct", "--allocations", "--noheader", "--parsable2", f"--format={columns}", "--jobs", number))
    except RunFailed as failure:
        why = "Slurm accounting storage is disabled"
        if why not in str(failure):
            raise
        text = ""
    tasks = [dict(zip(fields, line.split("|"), strict=True)) for line in text.splitlines() if line.strip()]
    if not tasks:
        raise ConfigError(
            f"Slurm knows no job {number}: it forgets jobs some minutes after their end, unless it keeps accounts"
        )
    return [{**task, "JobState": task["JobState"].split()[0]} for task in tasks]


def _code(tasks: Sequence[Mapping[str, str]]) -> int | None:
    """Return the exit code of a job, of several tasks the highest; None while one has not ended."""
    if any(task["JobState"] not in _ENDED for task in tasks):
        return None
    return max(_code_of(task) for task in tasks)


def _code_of(task: Mapping[str, str]) -> int:
    state, code = task["JobState"], int(task["ExitCode"].split(":")[0])
    if state == "CANCELLED":
        return Stopped.exit_code
    if state == "COMPLETED":
        return 0
    return (code or 1) if state == "FAILED" else 1


def _line(task: Mapping[str, str]) -> str:
    """Return a line about the state of a job or a task."""
    number = f"{task['ArrayJobId']}_{task.get('ArrayTaskId', '')}" if "ArrayJobId" in task else task["JobId"]
    state = task["JobState"]
    nodes = task.get("NodeList", "")
    restarts = int(task.get("Restarts", "0"))
    parts = [f"Slurm job {number}: {state}"]
    if state == "PENDING" and task.get("Reason", "None") != "None":
        parts[0] += f" ({task['Reason']})"
    if nodes and nodes != "(null)":
        parts.append(f"on {nodes}")
    if restarts:
        parts.append(f"restart {restarts}")
    if state in ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY"):
        parts.append(f"exit code {task['ExitCode'].split(':')[0]}")
    return ", ".join(parts)


def _pattern(tasks: Sequence[Mapping[str, str]]) -> str:
    """Return a pattern of the paths of a job's output files."""
    path = tasks[0].get("StdOut", "")
    if not path:
        raise ConfigError(
            f"Slurm no longer knows where job {tasks[0]['JobId']} has printed; see slurm-*.out in its folder"
        )
    if "ArrayJobId" not in tasks[0]:
        return path
    return re.sub(rf"{tasks[0]['ArrayJobId']}_[^.]*\.out$", f"{tasks[0]['ArrayJobId']}_*.out", path)
