"""The verb `launch`: lockstep launch WHERE [options] VERB ..., lockstep launch WHERE status JOB|RUN.

    lockstep launch slurm --nodes 2    train digits --ranks 4 optim.lr=0.1
                    launcher's flags   the command line as without `launch`, checked here as it would be there

A job is remembered in `launch/job.json` of its run's folder.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.cli.arguments import Command, Parser, Prepared, run_command
from lockstep.cli.section_flags import add_section, section_of
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.jobs import JOB_FILES, HostOptions, JobCommand, LaunchedJob, LaunchPlan
from lockstep.core.stopping import undo_on_stop, write_stderr
from lockstep.core.terminal import echo
from lockstep.launchers.registry import find_launcher, summaries

if TYPE_CHECKING:
    from lockstep.core.protocols import Launcher

VERBS = {"train": "train", "eval": "evaluate", "verify": "verify", "memory": "memory", "doctor": "doctor"}
"""Verbs that a launcher can run -> their modules, each with a function `prepare`."""
OF_JOBS = {
    "status": "print the state of a job",
    "follow": "print a job's output until it has ended, and return its exit code",
    "cancel": "stop a job for good",
}
"""Commands about a job, which take the place of VERB."""
WorldSize = Callable[[int | None], int | None]
"""Ranks of each node, if they are stated -> ranks on all nodes, if they follow."""
_RECORD = "job.json"
_MOST_RUNS = 1000  # of a sweep: more are a mistake

_BYTES_OF_TRAINED = 12  # of a parameter in fp32 and two moments

_EPILOG = f"""\
VERB is one of {", ".join(VERBS)}, with its own arguments: the same command line as without
`lockstep launch WHERE`. It is checked here, before anything is submitted. Of jobs:
  lockstep launch WHERE status JOB|RUN
  lockstep launch WHERE follow JOB|RUN
  lockstep launch WHERE cancel JOB|RUN
JOB is the identifier that was printed, RUN the folder of the run. Exit codes with --follow, and of `follow`, are
those of the command: 0 done, 1 failed, 2 fix your config, 75 stopped and saved, 130 stopped."""


def run(arguments: Sequence[str]) -> int:
    """Submit a command line to a launcher, or ask it about a job."""
    where = arguments[0] if arguments else ""
    if list(arguments) == ["ssh", "at-host"]:
        from lockstep.launchers.ssh_host import serve

        return serve()
    if ":" in where and not where.startswith("-"):
        return _launch(where, arguments[1:])
    if where and where not in ("-h", "--help", *COMMANDS):
        known = did_you_mean(where, COMMANDS, "it can be")
        raise ConfigError(f"{where!r} is no place to launch at; {known}; lockstep train --ranks N starts N ranks here")
    return run_command("launch", COMMANDS, arguments, "lockstep launch WHERE --help prints the options of a launcher.")


def _launch(where: str, arguments: Sequence[str]) -> int:
    launcher = find_launcher(where)
    parser = Parser(f"launch {where}", f"Runs a command line of Lockstep: {where}.", _EPILOG, "[options] VERB ...")
    add_section(parser, launcher.options)
    parser.add_argument("--dry-run", action="store_true", help="print what would be written and executed")
    parser.add_argument("--follow", action="store_true", help="print the output until the end; return its exit code")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="train one run for each value of a key; may be repeated, for all combinations",
    )
    own, words = _divided(arguments, parser.flags())
    args = parser.parse_args(own)
    if not words:
        raise ConfigError(f"lockstep launch {where} needs the command line to run, such as: train digits --ranks 2")
    if words[0] in OF_JOBS:
        return _of_job(where, launcher, words)
    options = section_of(args, launcher.options)
    command = _job_command(where, args.sweep, arguments, words, partial(_world_size, options))
    plan = launcher.plan(command, options)
    for note in plan.notes:
        echo(f"note: {note}", file=sys.stderr)
    if args.dry_run:
        _print_plan(plan)
        return 0
    _refuse_second(where, launcher, command)
    number = _submit(launcher, plan, command.folder)
    _remember(where, command, number)
    echo(f"{where} job {number}; its files are in {_short(command.folder)}", file=sys.stderr, flush=True)
    job = LaunchedJob(number, command.folder)
    if plan.attached:
        return launcher.follow(job)
    return _follow(where, launcher, job) if args.follow else 0


def _divided(arguments: Sequence[str], flags: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Return the launcher's own arguments, and the words from the first on that is neither a flag nor its value."""
    number = 0
    while number < len(arguments) and arguments[number].startswith("-"):
        number += 2 if flags.get(arguments[number]) else 1
    return list(arguments[:number]), list(arguments[number:])


def _world_size(options: object, ranks: int | None) -> int | None:
    """Return the number of ranks on all nodes; None if the command line doesn't show it."""
    if isinstance(options, HostOptions):
        return options.world_size(ranks)
    return None if ranks is None else int(getattr(options, "nodes", 1)) * ranks


# --- the command line that is launched ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Checked:
    """A command line that has been checked, and the arguments that name its run's folder."""

    verb: str
    arguments: tuple[str, ...]
    prepared: Prepared
    folder: Path
    naming: tuple[str, ...]


def _job_command(
    where: str, sweep: Sequence[str], typed: Sequence[str], words: Sequence[str], world_size: WorldSize
) -> JobCommand:
    """Check the command line and return it with what a launcher needs to know of it. Raises ConfigError."""
    checked = _checked(words, world_size)
    prepared, verb = checked.prepared, checked.verb
    runs = _sweep(sweep, checked, world_size)
    naming = () if runs else checked.naming
    restart = checked.arguments if prepared.restart is None else prepared.restart
    config = prepared.config
    ranks = config.launch.ranks if config is not None and prepared.starts_run else "auto"
    return JobCommand(
        words=(verb, *checked.arguments, *naming),
        restart_words=(verb, *restart, *naming),
        typed=shlex.join(["lockstep", "launch", where, *typed]),
        name=Path(prepared.name).name,
        folder=checked.folder.absolute() / JOB_FILES,
        ranks=ranks if isinstance(ranks, int) else None,
        nodes=prepared.starts_run,
        sweep=runs,
        state_bytes=_state_bytes(prepared),
        run_folder=checked.folder,
        checkpoint_folder=config.checkpoint.folder if config is not None else None,
        in_folder=config is None or config.checkpoint.storage is None,
    )


def _state_bytes(prepared: Prepared) -> int | None:
    """Return about how large a checkpoint is; None if the config doesn't show it, or the model can't be built here."""
    config = prepared.config
    if config is None or not prepared.starts_run:
        return None
    from lockstep.core.records import DataFacts
    from lockstep.plan.stated_facts import model_states_sizes

    if not model_states_sizes(config.model):
        return None
    from lockstep.models.build import describe_model

    try:
        facts = DataFacts(config.batch.global_size, None)
        parameters = describe_model(config.model, facts, trust_remote_code=prepared.trust_remote_code)
    except Failure:  # a login node may lack what the nodes have; there it would be reported
        return None
    return sum(_BYTES_OF_TRAINED * each.elements if each.trainable else each.bytes for each in parameters)


def _checked(words: Sequence[str], world_size: WorldSize) -> _Checked:
    verb, *arguments = words
    if verb not in VERBS:
        raise ConfigError(f"lockstep launch can't run {verb!r}; {did_you_mean(verb, [*VERBS, *OF_JOBS])}")
    prepared = cast("Prepared", import_module(f"lockstep.cli.{VERBS[verb]}").prepare(arguments))
    _check_ranks(prepared, world_size)
    if prepared.folder is not None:
        return _Checked(verb, tuple(arguments), prepared, prepared.folder, ())
    folder = _free_folder(prepared.name)
    naming = (f"run.folder={folder}",) if prepared.starts_run else ()
    return _Checked(verb, tuple(arguments), prepared, folder, naming)


def _check_ranks(prepared: Prepared, world_size: WorldSize) -> None:
    """Raise ConfigError if the run can't be distributed over the ranks of all nodes, as far as arithmetic shows."""
    config = prepared.config
    if config is None or not prepared.starts_run:
        return
    total = world_size(None if config.launch.ranks == "auto" else config.launch.ranks)
    if total is not None:
        from lockstep.plan.plan import check_on_ranks

        check_on_ranks(config, total)


def _free_folder(name: str) -> Path:
    """Return a folder that doesn't exist, named like that of a run without `run.folder`."""
    stem = Path("runs", f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    names = itertools.chain([stem], (Path(f"{stem}-{number}") for number in itertools.count(2)))
    return next(path for path in names if not path.exists())


def _sweep(sweep: Sequence[str], checked: _Checked, world_size: WorldSize) -> tuple[tuple[str, ...], ...]:
    """Return the words of each run of the sweep, all checked. Raises ConfigError."""
    if not sweep:
        return ()
    if not checked.prepared.starts_run:
        raise ConfigError(f"--sweep trains several runs, and {checked.verb} trains none")
    values = []
    for text in sweep:
        key, equals, listed = text.partition("=")
        if not equals or not key or "" in listed.split(","):
            raise ConfigError(Problem("--sweep", "", f"{text!r} is not KEY=A,B, such as optim.lr=0.1,0.01"))
        values.append([f"{key}={value}" for value in listed.split(",")])
    runs = [
        (*combination, f"run.folder={checked.folder / str(number)}")
        for number, combination in enumerate(itertools.islice(itertools.product(*values), _MOST_RUNS + 1))
    ]
    if len(runs) > _MOST_RUNS:
        raise ConfigError(Problem("--sweep", "", f"these are more than {_MOST_RUNS:,} runs; give fewer values"))
    for words in runs:
        _checked((checked.verb, *checked.arguments, *words), world_size)
    return tuple(runs)


# --- jobs -----------------------------------------------------------------------------------------------------------


def _print_plan(plan: LaunchPlan) -> None:
    for path, text in plan.files.items():
        echo(f"would write {_short(path)}:", file=sys.stderr, flush=True)
        echo(text, end="", flush=True)
    for words in plan.commands:
        echo(f"would execute: {shlex.join(words)}", file=sys.stderr)


def _follow(where: str, launcher: Launcher, job: LaunchedJob) -> int:
    ways = "; ".join(f"lockstep launch {where} {way} {job.number}" for way in ("follow", "cancel"))
    with undo_on_stop(lambda: write_stderr(f"the job continues: {ways}")):
        return launcher.follow(job)


def _of_job(where: str, launcher: Launcher, words: Sequence[str]) -> int:
    parser = Parser(f"launch {where} {words[0]}", f"{OF_JOBS[words[0]].capitalize()}.")
    parser.add_argument("job", metavar="JOB|RUN", help="the job's identifier, or a folder or a name of its run")
    job = _job(where, parser.parse_args(list(words[1:])).job)
    if words[0] == "follow":
        return _follow(where, launcher, job)
    if words[0] == "cancel":
        launcher.cancel(job)
        echo(f"{where} job {job.number} is canceled")
        return 0
    echo(launcher.status(job).text)
    return 0


def _submit(launcher: Launcher, plan: LaunchPlan, folder: Path) -> str:
    """Submit the job and return its identifier; leave no new folder behind if it is refused."""
    existed = folder.parent.exists()
    try:
        return launcher.submit(plan)
    except Failure:
        if not existed:
            shutil.rmtree(folder.parent, ignore_errors=True)
        raise


def _remember(where: str, command: JobCommand, number: str) -> None:
    from lockstep.launchers.tools import write_files

    record = {"launcher": where, "job": number, "command": command.typed, "submitted": time.strftime("%FT%T%z")}
    write_files({command.folder / _RECORD: json.dumps(record, indent=2) + "\n"})


def _job(where: str, text: str) -> LaunchedJob:
    """Return the job that an identifier or a run's folder names. Raises ConfigError."""
    if not Path(text).is_dir():
        return LaunchedJob(text)
    job = _remembered(where, Path(text, JOB_FILES))
    if job is None:
        raise ConfigError(f"{text} has no {JOB_FILES}/{_RECORD}: no job was launched for it; give the job's identifier")
    return job


def _remembered(where: str, folder: Path) -> LaunchedJob | None:
    path = folder / _RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(read_bounded(path, MAX_JSON_BYTES))
        launcher, number = str(record["launcher"]), str(record["job"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged; give the job's identifier") from None
    if launcher != where:
        raise ConfigError(f"{folder.parent} was launched with {launcher}: lockstep launch {launcher} ...")
    return LaunchedJob(number, folder)


def _refuse_second(where: str, launcher: Launcher, command: JobCommand) -> None:
    """Raise ConfigError if a job of the same run has not ended."""
    try:
        job = _remembered(where, command.folder)
        status = launcher.status(job) if job is not None else None
    except ConfigError:  # long forgotten
        return
    if job is not None and status is not None and status.code is None:
        way = f"lockstep launch {where} cancel {job.number}"
        raise ConfigError(f"this run has a job already ({status.text}); wait for its end, or stop it: {way}")


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


COMMANDS = {name: Command(text, partial(_launch, name)) for name, text in summaries().items()}
