"""The verb `doctor`: lockstep doctor [RUN] [--ranks N] [--known]."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.cli.arguments import Parser, Prepared, add_json, path, port, size, whole
from lockstep.core.errors import RunFailed
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Check this machine, or the links between ranks, or what happened in a run."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read the arguments."""
    parser = Parser("doctor", "Finds what makes training fail; exit code 3 if something is wrong.")
    parser.add_argument("run", nargs="?", type=path, metavar="RUN", help="a run's folder: state what happened in it")
    parser.add_argument("--known", action="store_true", help="print the catalog of known failures")
    parser.add_argument(
        "--folder", type=path, default=Path("runs"), metavar="FOLDER", help="where runs are; default %(default)s"
    )
    parser.add_argument("--port", type=port, default=0, metavar="N", help="the port that launch.port will have")
    parser.add_argument("--ranks", type=whole, metavar="N", help="measure collectives between N ranks instead")
    parser.add_argument("--device", default="auto", metavar="NAME", help="with --ranks: as launch.device")
    parser.add_argument(
        "--timeout",
        type=whole,
        default=60,
        metavar="N",
        help="with --ranks: seconds of a collective; default %(default)s",
    )
    parser.add_argument(
        "--size", type=size, default=16 << 20, metavar="SIZE", help="with --ranks: the largest buffer; default 16MiB"
    )
    add_json(parser)
    args = parser.parse_args(arguments)
    questions = {_diagnose: args.run is not None, _show_known: args.known, _measure: args.ranks is not None}
    chosen = [action for action, is_asked in questions.items() if is_asked] or [_examine]
    if len(chosen) > 1:
        parser.error("RUN, --known and --ranks exclude each other; name one")
    return Prepared(partial(chosen[0], args, _width()), name="doctor")


def _width() -> int:
    return shutil.get_terminal_size().columns


def _examine(args: argparse.Namespace, width: int) -> int:
    from lockstep.doctor.checks import examine
    from lockstep.doctor.findings import MachineView
    from lockstep.doctor.output import as_json, describe, exit_code

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    findings = examine(MachineView(folder=args.folder, cache=cache, port=args.port))
    if args.json:
        emit(as_json(findings))
    else:
        echo(describe(findings, width))
    return exit_code(findings)


def _measure(args: argparse.Namespace, width: int) -> int:
    from lockstep.config.schema import Launch
    from lockstep.doctor.ranks import start

    section = Launch(port=args.port, timeout=args.timeout, device=args.device)
    return start(args.ranks, section, args.size, width, as_json=args.json)


def _show_known(args: argparse.Namespace, width: int) -> int:
    from lockstep.doctor.run import describe_known, known_as_json

    if args.json:
        emit(known_as_json())
    else:
        echo(describe_known(width))
    return 0


def _diagnose(args: argparse.Namespace, width: int) -> int:
    from lockstep.doctor.run import describe_run, diagnose_run, run_as_json

    try:
        diagnosis = diagnose_run(args.run)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename or args.run}: {error.strerror or error}") from error
    if args.json:
        emit(run_as_json(diagnosis))
    else:
        echo(describe_run(diagnosis, width))
    return 3 if diagnosis.is_wrong else 0
