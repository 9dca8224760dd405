"""The verb `doctor`: lockstep doctor."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.cli.arguments import Parser, Prepared, add_json, path, port
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Check this machine."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read the arguments."""
    summary = "Checks this machine for what makes training fail; exit code 3 if something is wrong."
    parser = Parser("doctor", summary)
    parser.add_argument(
        "--folder",
        type=path,
        default=Path("runs"),
        metavar="FOLDER",
        help="where runs are written; default %(default)s",
    )
    parser.add_argument("--port", type=port, default=0, metavar="N", help="the port that launch.port will have")
    add_json(parser)
    return Prepared(partial(_examine, parser.parse_args(arguments)), name="doctor")


def _examine(args: argparse.Namespace) -> int:
    from lockstep.doctor.checks import examine
    from lockstep.doctor.findings import MachineView
    from lockstep.doctor.output import as_json, describe, exit_code

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    findings = examine(MachineView(folder=args.folder, cache=cache, port=args.port))
    if args.json:
        emit(as_json(findings))
    else:
        echo(describe(findings, shutil.get_terminal_size().columns))
    return exit_code(findings)
