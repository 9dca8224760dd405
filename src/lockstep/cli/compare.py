"""The verb `compare`: lockstep compare RUN RUN ..."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Parser, add_json, path, run_path
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.json_output import emit
from lockstep.core.near_runs import did_you_mean_run
from lockstep.core.terminal import echo

if TYPE_CHECKING:
    pass


def run(arguments: Sequence[str]) -> int:
    """Compare runs: curves, final figures, differences of configs, statistics over seeds."""
    summary = "Compares runs, also as one HTML page: curves, final figures, configs, mean and deviation over seeds."
    parser = Parser("compare", summary)
    what = "folders of runs; a folder of runs, such as a sweep's, stands for all of them"
    parser.add_argument("runs", nargs="*", type=run_path, metavar="RUN", help=what)
    parser.add_argument("--output", type=path, metavar="FILE", help="where to write the page; by default compare.html")
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.looking.listing import runs_in
    from lockstep.looking.states import status_of
    from lockstep.report.comparison import as_json, compare, text, write_comparison

    folders: list[Path] = []
    for place in args.runs:
        if not place.exists():
            raise ConfigError(f"there is no folder {place}{did_you_mean_run(place)}")
        if not (inside := list(runs_in(place))):
            raise ConfigError(f"{place} is neither the folder of a run nor one with runs in it")
        folders += inside
    comparison = compare(folders, {folder: status_of(folder).state.value for folder in folders})
    echo(text(comparison, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    for run in comparison.runs:
        for note in (*run.data.flaws, *run.ranks.flaws):
            echo(f"note: {note}")
    page = None
    try:
        page = str(write_comparison(comparison, args.output))
        echo(f"\n{page}")
    except RunFailed as error:  # the page of a folder that can't be written is left out, unless it was asked for
        if args.output is not None:
            raise
        echo(f"note: there is no page: {error}; --output FILE writes it elsewhere", file=sys.stderr)
    if args.json:
        emit({**as_json(comparison), "page": page})
    return 0
