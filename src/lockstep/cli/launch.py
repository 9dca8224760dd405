"""The verb `launch`: lockstep launch WHERE [options] VERB ..., lockstep launch WHERE status JOB|RUN."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Command, Parser, collected_notes, run_command
from lockstep.cli.launch_command import OF_JOBS, VERBS, job_command
from lockstep.cli.launch_jobs import find_job, submit_job
from lockstep.cli.section_flags import add_section, section_of
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem, refuse
from lockstep.core.jobs import HostOptions, LaunchedJob, LaunchPlan, SweepOptions
from lockstep.core.stopping import undo_on_stop, write_stderr
from lockstep.core.terminal import command_line, echo
from lockstep.launchers import find_launcher, introduction, summaries

if TYPE_CHECKING:
    from lockstep.core.protocols import Launcher

_EPILOG = f"""\
VERB is one of {", ".join(VERBS)}, with its own arguments: the same command line as without
`lockstep launch WHERE`. It is checked here, before anything is submitted. Of jobs:
  lockstep launch WHERE status JOB|RUN
  lockstep launch WHERE follow JOB|RUN
  lockstep launch WHERE cancel JOB|RUN
JOB is the identifier that was printed, RUN the folder of the run. Exit codes with --follow, and of `follow`, are
the command's: 0 done, 1 failed, 2 fix your config, 75 stopped and saved, 130 stopped."""

_RANKS = ("ranks", "nproc", "nproc-per-node", "np", "ntasks", "ntasks-per-node")


def run(arguments: Sequence[str]) -> int:
    """Submit a command line to a launcher, or ask it about a job."""
    where = arguments[0] if arguments else ""
    if where == "at-host":
        from lockstep.launchers.host_agent import serve

        return serve(arguments[1])
    if where == "on-ray":
        from lockstep.launchers.ray_driver import drive

        return drive(arguments[1])
    if where and not where.startswith("-"):
        return _launch(where, arguments[1:])
    return run_command("launch", COMMANDS, arguments, "lockstep launch WHERE --help prints the options of a launcher.")


def _launch(where: str, arguments: Sequence[str]) -> int:
    launcher = find_launcher(where)
    parser = Parser(f"launch {where}", introduction(where), _EPILOG, "[options] VERB ...")
    add_section(parser, launcher.options)
    parser.add_argument("--dry-run", action="store_true", help="print what would be written and executed")
    parser.add_argument("--follow", action="store_true", help="print the output until the end; return its exit code")
    sweep = "train a run for each value of a key; may be repeated, for all combinations"
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B", help=sweep)
    own, words = _divided(where, arguments, parser.flags())
    args = parser.parse_args(own)
    if not words:
        raise ConfigError(f"lockstep launch {where} needs the command line to run, such as: train digits --ranks 2")
    if words[0] in OF_JOBS:
        return _of_job(where, launcher, words)
    options = section_of(args, launcher.options)
    if args.sweep and not isinstance(options, SweepOptions):
        message = f"needs a queue with job arrays, and {where} has none; launch the runs one after the other"
        raise ConfigError(Problem("--sweep", "", message))
    with collected_notes() as notes:
        command = job_command(where, args.sweep, arguments, words, partial(_world_size, options))
        nodes = getattr(options, "nodes", 1)
        if isinstance(nodes, int) and nodes > 1 and not command.nodes:
            why = f"{nodes}, but `lockstep {command.words[0]}` runs on one node; leave it out"
            raise ConfigError(Problem("--nodes", "", why))
        plan = launcher.plan(command, options)
    for note in [*([] if plan.attached and not args.dry_run else notes), *(f"note: {note}" for note in plan.notes)]:
        echo(note, file=sys.stderr)  # an attached run prints notes on its config itself
    if args.dry_run:
        _print_plan(plan)
        return 0
    with undo_on_stop(lambda: _show_left(where, plan)):  # without a gap between the calls
        job = submit_job(where, launcher, command, plan)
        echo(f"{where} job {job.number}; its files are in {_short(command.folder)}", file=sys.stderr, flush=True)
        if plan.attached:
            return launcher.follow(job)
        return _follow(where, launcher, job) if args.follow else 0


def _world_size(options: object, ranks: int | None) -> int | None:
    if isinstance(options, HostOptions):
        return options.world_size(ranks)
    return None if ranks is None else int(getattr(options, "nodes", 1)) * ranks


def _divided(where: str, arguments: Sequence[str], flags: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the launcher's own arguments, and the words from the first one that isn't a flag or its value.

    Raises ConfigError for flags that the launcher doesn't have.
    """
    number, problems = 0, []
    while number < len(arguments) and arguments[number].startswith("-"):
        flag, equals, _ = arguments[number].partition("=")
        if flag not in flags and flag != "-h":
            problems.append(Problem(flag, "", _meant(where, flag, [*flags])))
        number += 2 if flags.get(flag) and not equals else 1
    refuse(problems)
    return list(arguments[:number]), list(arguments[number:])


def _meant(where: str, flag: str, known: Sequence[str]) -> str:
    name = flag.lstrip("-")
    if name.replace("_", "-") in _RANKS:
        return "belongs to the command, as --ranks N after its verb: train digits --ranks 2"
    if "." in name:
        return f"belongs to the command, after its verb: train digits {flag} ..."
    meant = closest_match(flag, known)
    ending = f"did you mean {meant}?" if meant else f"lockstep launch {where} --help lists them"
    return f"there is no such flag of launch {where}; {ending}"


# --- jobs -----------------------------------------------------------------------------------------------------------


def _print_plan(plan: LaunchPlan) -> None:
    for path, text in plan.files.items():
        echo(f"would write {_short(path)}:", file=sys.stderr, flush=True)
        echo(text, end="", flush=True)
    for words in plan.commands:
        echo(f"would execute: {shlex.join(words)}", file=sys.stderr)


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _show_left(where: str, plan: LaunchPlan) -> None:
    if plan.number:
        write_stderr(f"to end the rest of the job: lockstep launch {where} cancel {plan.number}")


def _follow(where: str, launcher: Launcher, job: LaunchedJob) -> int:
    ways = "; ".join(command_line("lockstep", "launch", where, way, job.number) for way in ("follow", "cancel"))
    with undo_on_stop(lambda: write_stderr(f"the job continues: {ways}")):
        return launcher.follow(job)


def _of_job(where: str, launcher: Launcher, words: Sequence[str]) -> int:
    parser = Parser(f"launch {where} {words[0]}", f"{OF_JOBS[words[0]].capitalize()}.")
    parser.add_argument("job", metavar="JOB|RUN", help="the job's identifier, or a folder or a name of its run")
    job = find_job(where, parser.parse_args(list(words[1:])).job)
    if words[0] == "follow":
        return _follow(where, launcher, job)
    if words[0] in ("cancel", "stop"):
        launcher.cancel(job)
        echo(f"{where} job {job.number} is canceled")
        return 0
    echo(launcher.status(job).text)
    return 0


COMMANDS = {name: Command(text, partial(_launch, name)) for name, text in summaries().items()}
