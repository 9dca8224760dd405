"""Runs a command as a batch job of Slurm.

`srun` starts a launcher on each node, which starts the ranks there. After exit code 75 (stopped and saved) the script
queues the job again.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.core.errors import ConfigError, Paused, Problem, RunFailed, Stopped, refuse
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan, SweepOptions
from lockstep.core.terminal import plain_line, shortened
from lockstep.launchers.mounts import Mount, mount_problems
from lockstep.launchers.tools import (
    OutputTail,
    as_comment,
    bash_array,
    execute,
    follow_until_end,
    own_program,
    program_words,
    refuse_to_cancel_ended,
    seconds_to_save,
    write_files,
)
from lockstep.strategies.section import Auto, Positive, Section

_NOT_HERE = "call this where Slurm's commands are, such as a login node; --dry-run prints the script anywhere"
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_POLL_S = 2.0  # between questions to the controller, which many users share
_LATE_OUTPUT_S = 1.0  # a shared folder may show the last lines late
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?")
_OWN = (
    {"array": "--sweep", "ntasks": "--ranks of the command", "ntasks-per-node": "--ranks of the command"}
    | {name: f"--{name}" for name in ("cpus-per-task", "gpus-per-node", "nodes", "time")}
    | {"signal": "--signal-before"}
)
"""Options of sbatch that Lockstep's script relies on -> what to give instead."""
_SHORT = {"-a": "array", "-c": "cpus-per-task", "-N": "nodes", "-n": "ntasks", "-t": "time"}
_MEETING = """
# The launchers connect to the first node, on a port that other jobs are unlikely to have. The id and the
# token differ for each start of the job: none takes part in an earlier start, and no stranger in this one.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
command+=(--nodes "$SLURM_JOB_NUM_NODES" --rendezvous "${hosts[0]}:$((10000 + SLURM_JOB_ID % 20000))")
command+=(--job-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")
LOCKSTEP_JOB_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export LOCKSTEP_JOB_TOKEN"""


class SlurmOptions(Section, SweepOptions):
    """Options of a job under Slurm."""

    nodes: Positive = 1
    """Number of nodes; on each of them one launcher starts the ranks."""
    partition: str | None = None
    """Partition of the cluster; by default the cluster's own choice."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have, such as `a100&nvlink`."""
    time: str | None = None
    """Time limit, such as 30 (minutes), 4:00:00 or 2-12:00:00; by default the partition's."""
    gpus_per_node: str | None = None
    """GPUs of each node, such as 8 or h100:8."""
    cpus_per_task: Positive | Auto = "auto"
    """CPUs for the ranks of a node together; auto: one for each rank or GPU, where their number is known."""
    mem: str | None = None
    """Memory of each node, such as 200G; 0 is all of it."""
    sbatch: tuple[str, ...] = ()
    """A further option of sbatch, passed on as it is, such as --sbatch=--reservation=night; may be repeated."""
    srun: tuple[str, ...] = ()
    """A further option of srun, passed on as it is, such as --srun=--mpi=none; may be repeated."""
    setup: tuple[str, ...] = ()
    """A line of bash that runs on the first node before the ranks start; may be repeated."""
    signal_before: Positive | Auto = "auto"
    """Seconds before the time limit to ask the ranks to save and stop; auto: a minute, and the time that
    200 MB/s a node take to save the state."""
    requeue: bool = True
    """Queue the job again when it was stopped and saved, or a node failed."""
    array_limit: Positive | None = None
    """Runs of a sweep that may run at once."""
    container_image: str | None = None
    """Container image that the ranks run in, by the plugin pyxis of srun."""
    container_mounts: tuple[str, ...] = ()
    """A further folder that the container sees, such as /data:/data; may be repeated."""
    program: str | None = None
    """Command that starts Lockstep on a node; by default this one's path, or `lockstep` in a container."""


class SlurmLauncher:
    """The launcher `slurm`."""

    options = SlurmOptions

    def plan(self, command: JobCommand, options: SlurmOptions) -> LaunchPlan:
        """Return the script and the command that submits it."""
        _check(command, options)
        path = command.folder / "job.sh"
        return LaunchPlan({path: _script(command, options, Path.cwd())}, (("sbatch", "--parsable", str(path)),))

    def submit(self, plan: LaunchPlan) -> str:
        """Write the script and submit it; return the job's number."""
        execute(("sbatch", "--version"), _NOT_HERE)
        write_files(plan.files)
        return execute(plan.commands[0], _NOT_HERE).strip().split(";")[0]  # JOB;CLUSTER if there are several clusters

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the state of a job, or of all runs of a sweep."""
        tasks = _tasks(job.number)
        return JobStatus("\n".join(_line(task) for task in tasks), _code(tasks))

    def follow(self, job: LaunchedJob) -> int:
        """Print the job's output and its changes of state until it has ended."""
        tail = OutputTail(_pattern(_tasks(job.number)))

        def print_new(status: JobStatus) -> None:
            if status.code is not None:
                time.sleep(_LATE_OUTPUT_S)
            tail.print_new()

        return follow_until_end("slurm", job.number, lambda: self.status(job), print_new, _POLL_S)

    def cancel(self, job: LaunchedJob) -> None:
        """Cancel the job: Slurm sends SIGTERM to its processes, so the ranks save as far as Slurm's KillWait allows."""
        refuse_to_cancel_ended(self.status(job))
        execute(("scancel", job.number), _NOT_HERE)


SLURM = SlurmLauncher()


# --- options --------------------------------------------------------------------------------------------------------


def _check(command: JobCommand, options: SlurmOptions) -> None:
    problems = [*_misfitting(command, options)]
    if options.container_image is not None:
        here = str(Path.cwd())
        parts = [text.split(":") for text in options.container_mounts]
        mounts = [Mount(os.path.normpath(part[0]), os.path.normpath(part[min(1, len(part) - 1)])) for part in parts]
        problems += mount_problems(command, [Mount(here, here), *mounts], Path(here), "--container-mounts", "")
    refuse(problems)


def _misfitting(command: JobCommand, options: SlurmOptions) -> Iterator[Problem]:
    if options.array_limit is not None and not command.sweep:
        yield Problem("--array-limit", "", "is for the runs of a sweep; give --sweep KEY=A,B too")
    if options.container_mounts and options.container_image is None:
        yield Problem("--container-mounts", "", "is for a container; give --container-image too")
    for flag, word in [*(("--sbatch", word) for word in options.sbatch), *(("--srun", word) for word in options.srun)]:
        name = word[2:].partition("=")[0] if word.startswith("--") else _SHORT.get(word[:2], "")
        if not re.fullmatch(r"--?[A-Za-z].*", word):
            yield Problem(flag, "", f"{shortened(word)} is not an option; write {flag}=--name=value")
        elif flag == "--sbatch" and name in _OWN:
            yield Problem(flag, "", f"{shortened(word)} would contradict the script; give {_OWN[name]} instead")
    limit, before = _limit_seconds(options.time or ""), _signal_before(command, options)
    if limit and 2 * before > limit:
        why = f"is {limit} s, and the ranks are asked to save {before} s before its end; give more, or --signal-before"
        yield Problem("--time", "", why)


def _limit_seconds(time: str) -> int | None:
    """Return the seconds of a time limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None or 0: there is none."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == len(parts) else (60, 1)
    return 86_400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _signal_before(command: JobCommand, options: SlurmOptions) -> int:
    return seconds_to_save(command, options.nodes) if options.signal_before == "auto" else options.signal_before


# --- the script -----------------------------------------------------------------------------------------------------


def _script(command: JobCommand, options: SlurmOptions, directory: Path) -> str:
    parts = [
        "#!/usr/bin/env bash",
        f"# {as_comment(command.typed)}",
        "# Written by that command, to be read, changed and submitted again: sbatch "
        + as_comment(shlex.quote(f"{command.folder}/job.sh")),
        *_directives(command, options, directory),
        "",
        "set -eo pipefail",
        *options.setup,
        "set -u",  # not for the lines of the user: scripts that activate an environment read variables without a value
        *_command(command, options),
        *([_MEETING] if options.nodes > 1 else []),
        *_srun(command, options, directory),
        *_ending(command, options),
    ]
    return "\n".join(parts) + "\n"


def _directives(command: JobCommand, options: SlurmOptions, directory: Path) -> Iterator[str]:
    cpus = _cpus(command, options)
    output = f"{str(command.folder).replace('%', '%%')}/{'slurm-%A_%a.out' if command.sweep else 'slurm-%j.out'}"
    yield _directive(f"--job-name={plain_line(command.name)}")
    yield _directive(f"--chdir={directory}")
    for name in ("nodes", "partition", "account", "qos", "constraint", "time", "gpus_per_node", "mem"):
        if (value := getattr(options, name)) is not None:
            yield _directive(f"--{name.replace('_', '-')}={value}")
    if command.sweep:
        limit = f"%{options.array_limit}" if options.array_limit else ""
        yield "# A sweep: each task of the array is one run."
        yield _directive(f"--array=0-{len(command.sweep) - 1}{limit}")
    yield "# One task on each node: the launcher, which starts the ranks of its node and reports the first failure."
    yield _directive("--ntasks-per-node=1")
    if cpus is not None:
        yield "# They share the CPUs of this one task; by default Slurm gives it a single one."
        yield _directive(f"--cpus-per-task={cpus}")
    yield "# A job that is queued again continues its output."
    yield _directive(f"--output={output}")
    yield _directive("--open-mode=append")
    yield f"# Seconds before the time limit, all ranks get SIGUSR1: they save and exit with {Paused.exit_code}."
    yield _directive(f"--signal=USR1@{_signal_before(command, options)}")
    if options.requeue:
        yield "# Also after the failure of a node, and after preemption, the job is queued again, and the run resumes."
    yield _directive("--requeue" if options.requeue else "--no-requeue")
    yield from (_directive(word) for word in options.sbatch)


def _directive(option: str) -> str:
    if not option.isprintable():
        raise ConfigError(f"{shortened(option)} has characters that a line of sbatch can't have; name it otherwise")
    return f"#SBATCH {shlex.quote(option)}"


def _cpus(command: JobCommand, options: SlurmOptions) -> int | None:
    """Return the CPUs of a node's task: by default one for each rank, or for each GPU if their number is known."""
    if options.cpus_per_task != "auto":
        return options.cpus_per_task
    gpus = (options.gpus_per_node or "").rpartition(":")[2]
    return command.ranks or (int(gpus) if gpus.isdecimal() and int(gpus) else None)


def _command(command: JobCommand, options: SlurmOptions) -> Iterator[str]:
    in_image = "lockstep" if options.container_image is not None else own_program()
    yield ""
    yield f"program=({in_image if options.program is None else bash_array(program_words(options.program))})"
    if command.restart_words == command.words:
        yield f"command=({bash_array(command.words)})"
    else:
        yield 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then'
        yield f"    command=({bash_array(command.words)})"
        yield "else # queued again: resume what the first start has begun"
        yield f"    command=({bash_array(command.restart_words)})"
        yield "fi"
    if command.sweep:
        yield "case $SLURM_ARRAY_TASK_ID in"
        yield from (f"{number}) command+=({bash_array(words)}) ;;" for number, words in enumerate(command.sweep))
        yield "esac"


def _srun(command: JobCommand, options: SlurmOptions, directory: Path) -> Iterator[str]:
    words = ["srun", "--kill-on-bad-exit=1"]
    if (cpus := _cpus(command, options)) is not None:
        words.append(f"--cpus-per-task={cpus}")  # srun doesn't take this over from sbatch by itself
    if options.container_image is not None:
        mounts = ",".join([f"{directory}:{directory}", *options.container_mounts])
        words += [f"--container-image={options.container_image}", f"--container-mounts={mounts}"]
        words += [f"--container-workdir={directory}"]
    yield ""
    yield "code=0"
    start = shlex.join([*words, *options.srun])
    if options.nodes > 1:
        yield "# shellcheck disable=SC2016 # each task expands its own number"
        start = f"""{start} bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' launcher"""
    yield f"{start} \\"
    yield '    "${program[@]}" "${command[@]}" || code=$?'


def _ending(command: JobCommand, options: SlurmOptions) -> Iterator[str]:
    if options.requeue:
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if command.sweep else "$SLURM_JOB_ID"
        yield ""
        yield f"if [ $code = {Paused.exit_code} ]; then # stopped and saved: resume as soon as there are nodes again"
        yield f'    scontrol requeue "{job}"'
        yield "fi"
    yield "exit $code"


# --- what Slurm knows of a job --------------------------------------------------------------------------------------


def _tasks(number: str) -> list[Mapping[str, str]]:
    if not re.fullmatch(r"\d+(_\d+)?", number):
        raise ConfigError(f"{number!r} is neither the number of a Slurm job nor the folder of its run")
    try:
        text = execute(("scontrol", "--oneliner", "show", "job", number), _NOT_HERE)
    except RunFailed as failure:
        if "Invalid job id" not in str(failure):
            raise
        return _accounted(number)
    return [dict(re.findall(r"(\w+(?:/\w+)?)=(\S*)", line)) for line in text.splitlines() if "JobId=" in line]


def _accounted(number: str) -> list[Mapping[str, str]]:
    """Return the same of a job that the controller has forgotten, minutes after its end."""
    fields, columns = ("JobId", "JobState", "ExitCode", "NodeList"), "JobID,State,ExitCode,NodeList"
    try:
        text = execute(("sacct", "--allocations", "--noheader", "--parsable2", f"--format={columns}", "--jobs", number))
    except RunFailed as failure:
        if "Slurm accounting storage is disabled" not in str(failure):
            raise
        text = ""
    tasks = [dict(zip(fields, line.split("|"), strict=True)) for line in text.splitlines() if line.strip()]
    if not tasks:
        why = "it forgets jobs some minutes after their end, unless it keeps accounts"
        raise ConfigError(f"Slurm knows no job {number}: {why}")
    return [{**task, "JobState": task["JobState"].split()[0]} for task in tasks]


def _code(tasks: Sequence[Mapping[str, str]]) -> int | None:
    """Return the exit code of a job, of several tasks the highest; None while one has not ended."""
    if any(task["JobState"] not in _ENDED for task in tasks):
        return None
    return max(_code_of(task) for task in tasks)


def _code_of(task: Mapping[str, str]) -> int:
    code = int(task["ExitCode"].split(":")[0]) or 1
    return {"CANCELLED": Stopped.exit_code, "COMPLETED": 0, "FAILED": code}.get(task["JobState"], 1)


def _line(task: Mapping[str, str]) -> str:
    number = f"{task['ArrayJobId']}_{task.get('ArrayTaskId', '')}" if "ArrayJobId" in task else task["JobId"]
    state, nodes, reason = task["JobState"], task.get("NodeList", ""), task.get("Reason", "None")
    text = f"Slurm job {number}: {state}"
    if state == "PENDING" and reason != "None":
        text += f" ({reason})"
    if nodes and nodes != "(null)":
        text += f", on {nodes}"
    if task.get("Restarts", "0") != "0":
        text += f", restart {task['Restarts']}"
    if state in ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY"):
        text += f", exit code {task['ExitCode'].split(':')[0]}"
    return text


def _pattern(tasks: Sequence[Mapping[str, str]]) -> str:
    path, array = tasks[0].get("StdOut", ""), tasks[0].get("ArrayJobId")
    if not path:
        where = "see slurm-*.out in its folder"
        raise ConfigError(f"Slurm no longer knows where job {tasks[0]['JobId']} has printed; {where}")
    return path if array is None else re.sub(rf"{array}_[^.]*\.out$", f"{array}_*.out", path)
