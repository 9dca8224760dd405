"""The batch script of a job under Slurm, and the options that it is written from.

#SBATCH lines    what the job needs, how it is warned, where it prints
setup            the modules and lines that the user gives
srun             one launcher on each node, which starts the ranks of its node
after srun       exit code 75, stopped and saved: queued again; any other ends the job
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from lockstep.core.errors import ConfigError, Paused, Problem
from lockstep.core.jobs import JobCommand, SweepOptions
from lockstep.core.terminal import plain_line, shortened
from lockstep.launchers.mounts import Mount, is_seen, mounting, unseen_problems
from lockstep.launchers.tools import as_comment, bash_array, own_program, program_words, seconds_to_save
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

_MOUNT = re.compile(r"[^:,\s][^:,\n]*(:/[^:,\n]*(:[a-z+-]+)?)?")
_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,6})(?::(?P<minutes>[0-9]{1,6})(?::(?P<seconds>[0-9]{1,6}))?)?"
    r"|(?P<rest>[0-9]{1,9}(?::[0-9]{1,9}){0,2}))"
)
_NO_LIMIT = ("0", "INFINITE", "UNLIMITED")
_OWN = {
    "array": "--sweep KEY=A,B trains several runs",
    "cpus-per-task": "give --cpus-per-task",
    "gpus-per-node": "give --gpus-per-node",
    "nodes": "give --nodes",
    "ntasks": "the ranks are --ranks of the command",
    "ntasks-per-node": "the ranks are --ranks of the command",
    "signal": "give --signal-before",
    "time": "give --time",
}
"""Options of sbatch that Lockstep's script relies on -> what to write instead."""
_MOST_OF_16_BITS = 65_535
_SHORT = {"-a": "array", "-c": "cpus-per-task", "-N": "nodes", "-n": "ntasks", "-t": "time"}
_CPUS_OF_A_GPU = 4


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
    exclusive: bool = False
    """Share the nodes with no other job."""
    sbatch: tuple[str, ...] = ()
    """A further option of sbatch, passed on as it is, such as --sbatch=--reservation=night; may be repeated."""
    srun: tuple[str, ...] = ()
    """A further option of srun, passed on as it is, such as --srun=--mpi=none; may be repeated."""
    module: tuple[str, ...] = ()
    """An environment module to load, such as cuda/12.4; may be repeated."""
    setup: tuple[str, ...] = ()
    """A line of bash that runs on the first node before the ranks start; may be repeated."""
    signal_before: Positive | Auto = "auto"
    """Seconds before the time limit at which the ranks are asked to save and stop; auto: a minute, and the time that
    200 MB/s a node take to save the state."""
    requeue: bool = True
    """Queue the job again when it was stopped and saved, or a node failed."""
    array_limit: Positive | None = None
    """Runs of a sweep that may run at once."""
    container: Literal["pyxis", "apptainer"] = "pyxis"
    """The program that runs the container: the plugin pyxis of srun, or apptainer."""
    container_image: str | None = None
    """Container image that the ranks run in, as pyxis or apptainer names it."""
    container_mounts: tuple[str, ...] = ()
    """A further folder that the container sees, such as /data:/data; may be repeated."""
    program: str | None = None
    """Command that starts Lockstep on a node; by default this one's path, or `lockstep` in a container."""


def check(command: JobCommand, options: SlurmOptions) -> None:
    """Raise ConfigError if the options don't fit together or with the command."""
    problems = []
    if options.nodes > 1 and not command.nodes:
        message = f"{options.nodes}, but `lockstep {command.words[0]}` runs on one node; leave it out"
        problems.append(Problem("--nodes", "", message))
    if options.array_limit is not None and not command.sweep:
        problems.append(Problem("--array-limit", "", "is for the runs of a sweep; give --sweep KEY=A,B too"))
    if options.container_mounts and options.container_image is None:
        problems.append(Problem("--container-mounts", "", "is for a container; give --container-image too"))
    if options.container == "apptainer" and options.container_image is None:
        problems.append(Problem("--container", "", "apptainer needs an image; give --container-image too"))
    for flag, words in (("--sbatch", options.sbatch), ("--srun", options.srun)):
        problems += [
            Problem(flag, "", f"{shortened(word)} is not an option; write {flag}=--name=value")
            for word in words
            if not re.fullmatch(r"--?[A-Za-z][^\n]*", word)
        ]
    problems += [*_contradicting(options.sbatch), *_unreadable(command, options), *_unseen(command, options)]
    limit, before = _limit_seconds(options.time), signal_before(command, options)
    if limit is not None and 2 * before > limit:
        message = (
            f"{options.time} is {limit} s, and the ranks are asked to stop {before} s before its end, to save; give a "
            "longer --time, or a shorter --signal-before"
        )
        problems.append(Problem("--time", "", message))
    if problems:
        raise ConfigError(problems)


def _contradicting(words: Sequence[str]) -> Iterator[Problem]:
    """Yield which further options of sbatch the script sets itself."""
    for word in words:
        name = word[2:].partition("=")[0] if word.startswith("--") else _SHORT.get(word[:2], "")
        if name in _OWN:
            yield Problem("--sbatch", "", f"{shortened(word)} would contradict the script; {_OWN[name]} instead")


def _limit_seconds(time: str | None) -> int | None:
    """Return the seconds of a time limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None if it isn't one."""
    match = _TIME.fullmatch(time or "")
    if match is None or time in _NO_LIMIT:
        return None
    if match["rest"] is None:
        days, hours, minutes, seconds = (int(match[unit] or 0) for unit in ("days", "hours", "minutes", "seconds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    numbers = [int(part) for part in match["rest"].split(":")]
    if len(numbers) == 1:
        return 60 * numbers[0]
    return sum(number * factor for number, factor in zip(reversed(numbers), (1, 60, 3600), strict=False))


def _unreadable(command: JobCommand, options: SlurmOptions) -> Iterator[Problem]:
    """Yield texts that would not be what they seem in the script."""
    if options.program is not None:
        program_words(options.program)
    if not str(command.folder).isprintable():
        message = f"{shortened(str(command.run_folder))} has characters that sbatch can't read; name it otherwise"
        yield Problem("", "run.folder", message)
    texts = {"--container-image": [options.container_image], "--module": options.module}
    for flag, values in texts.items():
        for value in values:
            if value is not None and (not value.strip() or value.startswith("-") or not value.isprintable()):
                yield Problem(flag, "", f"{shortened(value)} is not a name")
    for value in options.container_mounts:
        if not _MOUNT.fullmatch(value):
            message = f"{shortened(value)} is not FOLDER:/PATH, such as /data:/data"
            yield Problem("--container-mounts", "", message)
    for flag, number in (("--cpus-per-task", options.cpus_per_task), ("--signal-before", options.signal_before)):
        if number != "auto" and number > _MOST_OF_16_BITS:
            yield Problem(flag, "", f"{number} is more than Slurm takes; give at most {_MOST_OF_16_BITS}")


def _unseen(command: JobCommand, options: SlurmOptions) -> list[Problem]:
    """Return the paths that a container would not have."""
    if options.container_image is None:
        return []
    here = str(Path.cwd())
    mounts = [Mount(here, here)]
    if options.container == "apptainer":  # mounts these by itself
        mounts += [Mount(place, place) for place in (str(Path.home()), "/tmp")]
    parts = [text.split(":") for text in options.container_mounts]
    mounts += [
        Mount(os.path.normpath(part[0]), os.path.normpath(part[1] if len(part) > 1 else part[0])) for part in parts
    ]
    problems = unseen_problems(command.paths, mounts, Path(here), "--container-mounts", "")
    kept = Path(here, command.checkpoint_folder or command.run_folder)
    if command.starts_run and not is_address(str(command.checkpoint_folder)) and not is_seen(kept, mounts):
        remedy = mounting("--container-mounts", Path(os.path.realpath(kept)).parent)
        message = f"would be lost with the container: {kept} is in no folder that it has; give {remedy}"
        problems.append(
            Problem("", "run.folder" if command.checkpoint_folder is None else "checkpoint.folder", message)
        )
    return problems


def signal_before(command: JobCommand, options: SlurmOptions) -> int:
    """Return how many seconds before the limit Slurm asks the ranks to stop."""
    return seconds_to_save(command, options.nodes) if options.signal_before == "auto" else options.signal_before


# --- the script -----------------------------------------------------------------------------------------------------


def script(command: JobCommand, options: SlurmOptions, directory: Path) -> str:
    """Return the script.

    Args:
        directory: Where the command is run.
    """
    parts = [
        "#!/usr/bin/env bash",
        f"# {as_comment(command.typed)}",
        "# Written by that command, to be read, changed and submitted again: sbatch "
        + as_comment(shlex.quote(f"{command.folder}/job.sh")),
        *_directives(command, options, directory),
        "",
        "set -eo pipefail",
        *_setup(options),
        "set -u",  # not for the lines of the user: scripts that activate an environment read variables without a value
        *_command(command, options),
        *_meeting(options),
        *_srun(command, options, directory),
        *_ending(command, options),
    ]
    return "\n".join(parts) + "\n"


def output(command: JobCommand) -> Path:
    """Return the path of the job's output, in which Slurm replaces %j, %A and %a."""
    folder = Path(str(command.folder).replace("%", "%%"))
    return folder / ("slurm-%A_%a.out" if command.sweep else "slurm-%j.out")


def _directives(command: JobCommand, options: SlurmOptions, directory: Path) -> Iterator[str]:
    cpus = _cpus(command, options)
    plain: Mapping[str, object] = {
        "job-name": plain_line(command.name),
        "chdir": directory,
        "nodes": options.nodes,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "time": options.time,
        "gpus-per-node": options.gpus_per_node,
        "mem": options.mem,
    }
    yield from (_directive(f"--{name}={value}") for name, value in plain.items() if value is not None)
    if options.exclusive:
        yield _directive("--exclusive")
    if command.sweep:
        limit = f"%{options.array_limit}" if options.array_limit else ""
        yield "# A sweep: each task of the array is one run."
        yield _directive(f"--array=0-{len(command.sweep) - 1}{limit}")
    yield "# One task on each node: the launcher, which starts the ranks of its node and names the first that fails."
    yield _directive("--ntasks-per-node=1")
    if cpus is not None:
        yield "# They share the CPUs of this one task, of which Slurm gives a single one by default."
        yield _directive(f"--cpus-per-task={cpus}")
    yield "# A job that is queued again continues its output."
    yield _directive(f"--output={output(command)}")
    yield _directive("--open-mode=append")
    yield f"# Seconds before the time limit, all ranks get SIGUSR1: they save and exit with {Paused.exit_code}."
    yield _directive(f"--signal=USR1@{signal_before(command, options)}")
    if options.requeue:
        yield "# Also after the failure of a node, and after preemption, the job is queued again, and the run resumes."
    yield _directive("--requeue" if options.requeue else "--no-requeue")
    yield from (_directive(word) for word in options.sbatch)


def _directive(option: str) -> str:
    """Return a line for sbatch, which reads quotes as a shell does."""
    if not option.isprintable():
        raise ConfigError(f"{shortened(option)} has characters that a line of sbatch can't have; name it otherwise")
    return f"#SBATCH {shlex.quote(option)}"


def _cpus(command: JobCommand, options: SlurmOptions) -> int | None:
    if options.cpus_per_task != "auto":
        return options.cpus_per_task
    return command.ranks or _gpus(options)


def _gpus(options: SlurmOptions) -> int | None:
    """Return the GPUs of a node, if their number is known."""
    number = (options.gpus_per_node or "").rpartition(":")[2]
    return int(number) if number.isdecimal() and int(number) else None


def notes(command: JobCommand, options: SlurmOptions) -> Iterator[str]:
    """Yield what a node with GPUs is short of: loader workers and pinned memory need CPUs and memory beside them."""
    gpus, cpus, passed = _gpus(options), _cpus(command, options), " ".join(options.sbatch)
    if gpus is None or cpus is None:
        return
    if cpus < _CPUS_OF_A_GPU * gpus and "--cpus-per-" not in passed:
        few = f"{cpus} CPUs for the {gpus} GPUs of a node, and data loader workers need some too"
        yield f"{few}; give --cpus-per-task, for example {2 * _CPUS_OF_A_GPU * gpus}"
    if options.mem is None and "--mem" not in passed:
        yield "no --mem is given, so the cluster's default holds, which may be small; --mem 0 asks for all of a node's"


def _setup(options: SlurmOptions) -> Iterator[str]:
    if options.module or options.setup:
        yield ""
    if options.module:
        yield f"module load {shlex.join(options.module)}"
    yield from options.setup


def _command(command: JobCommand, options: SlurmOptions) -> Iterator[str]:
    yield ""
    yield f"program=({_program(options)})"
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


def _program(options: SlurmOptions) -> str:
    """Return the words that start Lockstep on a node, for an array of bash."""
    if options.program is not None:
        return bash_array(program_words(options.program))
    if options.container_image is not None:
        return "lockstep"
    return own_program()


def _meeting(options: SlurmOptions) -> Iterator[str]:
    """Yield the lines by which launchers on several nodes find each other."""
    if options.nodes == 1:
        return
    yield ""
    yield "# The launchers connect to the first node, on a port that other jobs are unlikely to have. The id and the"
    yield "# token differ for each start of the job: none takes part in an earlier start, and no stranger in this one."
    yield 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield 'command+=(--nodes "$SLURM_JOB_NUM_NODES" --rendezvous "${hosts[0]}:$((10000 + SLURM_JOB_ID % 20000))")'
    yield 'command+=(--job-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")'
    yield "LOCKSTEP_JOB_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
    yield "export LOCKSTEP_JOB_TOKEN"


def _srun(command: JobCommand, options: SlurmOptions, directory: Path) -> Iterator[str]:
    words = ["srun", "--kill-on-bad-exit=1"]
    if (cpus := _cpus(command, options)) is not None:
        words.append(f"--cpus-per-task={cpus}")  # srun doesn't take this over from sbatch by itself
    inside: list[str] = []
    mounts = ",".join([f"{directory}:{directory}", *options.container_mounts])
    if options.container_image is not None and options.container == "pyxis":
        words += [f"--container-image={options.container_image}", f"--container-mounts={mounts}"]
        words += [f"--container-workdir={directory}"]
    elif options.container_image is not None:
        gpus = ["--nv"] if options.gpus_per_node else []
        inside = ["apptainer", "exec", *gpus, "--bind", mounts, "--pwd", str(directory), options.container_image]
    yield ""
    yield "code=0"
    start, launcher = shlex.join([*words, *options.srun]), f'{shlex.join(inside)} "${{program[@]}}" "${{command[@]}}"'
    if options.nodes > 1:
        yield "# shellcheck disable=SC2016 # each task expands its own number"
        start = f"""{start} bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' launcher"""
    yield f"{start} \\"
    yield f"    {launcher.strip()} || code=$?"


def _ending(command: JobCommand, options: SlurmOptions) -> Iterator[str]:
    if options.requeue:
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if command.sweep else "$SLURM_JOB_ID"
        yield ""
        yield f"if [ $code = {Paused.exit_code} ]; then # stopped and saved: resume as soon as there are nodes again"
        yield f'    scontrol requeue "{job}"'
        yield "fi"
    yield "exit $code"
