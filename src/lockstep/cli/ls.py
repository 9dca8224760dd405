"""The verb `ls`: lockstep ls [FOLDER ...]."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.arguments import Parser, add_json, path
from lockstep.core.errors import ConfigError
from lockstep.core.json_output import emit
from lockstep.core.near_runs import did_you_mean_run
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """List runs with their state, step, loss, speed, age and host."""
    parser = Parser("ls", "Lists the runs of a folder, the newest first, with state and progress.")
    parser.add_argument("folder", nargs="*", type=path, metavar="FOLDER", help="default: the current one, and runs")
    add_json(parser, "list, an object for each run,")
    args = parser.parse_args(arguments)
    for folder in args.folder:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}{did_you_mean_run(folder)}")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(f"folder {folder} can't be read: permission denied")

    from lockstep.looking.listing import RUNS, describe, list_runs

    rows = list_runs(args.folder or [Path(), Path(RUNS)])
    echo(describe(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    emit([row.as_json() for row in rows])
    return 0
