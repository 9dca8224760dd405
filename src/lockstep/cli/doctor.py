"""The verb `doctor`: lockstep doctor [RUN] [--ranks N [--nodes M --rendezvous HOST:PORT]] [--known]."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.cli.arguments import (
    HOST_FLAGS,
    Parser,
    Prepared,
    add_hosts,
    add_json,
    path,
    port,
    refuse_hosts_without_number,
    run_path,
    size,
    whole,
)
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Check this machine, or the links between ranks, or what happened in a run."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read the arguments."""
    parser = Parser("doctor", "Finds what makes training fail; exit code 3 if something is wrong.")
    parser.add_argument("run", nargs="?", type=run_path, metavar="RUN", help="a run's folder: say what happened in it")
    parser.add_argument("--known", action="store_true", help="print the catalog of known failures")
    parser.add_argument("--folder", type=path, default=Path("runs"), metavar="FOLDER", help="of runs; default runs")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="the port that launch.port will have")
    parser.add_argument("--ranks", type=whole, metavar="N", help="measure between N ranks on this machine instead")
    add_hosts(parser)
    parser.add_argument("--interface", metavar="NAME", help="with --ranks: as launch.interface")
    parser.add_argument("--device", default="auto", metavar="NAME", help="with --ranks: as launch.device")
    text = "with --ranks: seconds of a collective; default %(default)s"
    parser.add_argument("--timeout", type=whole, default=60, metavar="N", help=text)
    text = "with --ranks: the largest buffer; default 16MiB"
    parser.add_argument("--size", type=size, default=16 << 20, metavar="SIZE", help=text)
    add_json(parser, "object (with --known: a list)")
    args = parser.parse_args(arguments)
    measures = args.ranks is not None or args.launch_nodes is not None
    questions = {_diagnose: args.run is not None, _show_known: args.known, _measure: measures}
    chosen = [action for action, is_asked in questions.items() if is_asked] or [_examine]
    if len(chosen) > 1:
        parser.error("RUN, --known and --ranks (or --nodes) exclude each other; name one")
    refuse_hosts_without_number(args, args.launch_nodes or 1)
    answers_here = args.run is not None or args.known
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Prepared(partial(chosen[0], args, width), name="doctor", nodes=not answers_here, ranks=args.ranks)


def _examine(args: argparse.Namespace, width: int | None) -> int:
    from lockstep.doctor.checks import examine
    from lockstep.doctor.findings import MachineView, as_json, describe, exit_code

    findings = examine(MachineView(folder=args.folder, port=args.port))
    if args.json:
        emit(as_json(findings))
    else:
        echo(describe(findings, width))
    return exit_code(findings)


def _measure(args: argparse.Namespace, width: int | None) -> int:
    from lockstep.config.schema import Launch
    from lockstep.doctor.ranks import Measurement, start

    given = {name: getattr(args, name) for name in ("port", "timeout", "device", "interface")}
    given |= {name: getattr(args, f"launch_{name}") for name in HOST_FLAGS}
    section = Launch(**{**given, "ranks": args.ranks or "auto", "nodes": args.launch_nodes or 1})
    return start(Measurement(section, args.size, width, args.json))


def _show_known(args: argparse.Namespace, width: int | None) -> int:
    from lockstep.doctor.run import describe_known, known_as_json

    if args.json:
        emit(known_as_json())
    else:
        echo(describe_known(width))
    return 0


def _diagnose(args: argparse.Namespace, width: int | None) -> int:
    from lockstep.doctor.run import describe_run, diagnose_run, run_as_json

    diagnosis = diagnose_run(args.run)
    if args.json:
        emit(run_as_json(diagnosis))
    else:
        echo(describe_run(diagnosis, width))
    return 3 if diagnosis.is_wrong else 0
