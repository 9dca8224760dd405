"""The verb `top`: lockstep top [RUN] [--once | --json]."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from lockstep.cli.arguments import Parser, add_json, run_path
from lockstep.core.json_output import emit

_HEIGHT_OF_ONCE = 60


def run(arguments: Sequence[str]) -> int:
    """Show what all ranks of a run do, live in a terminal."""
    parser = Parser("top", "Shows a run live: progress, loss, and what each rank is doing. Press q to quit.")
    text = "the run's folder; default: the newest that is running here or in runs"
    parser.add_argument("run", nargs="?", type=run_path, metavar="RUN", help=text)
    parser.add_argument("--once", action="store_true", help="print the state once, as without a terminal")
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.looking.screen import draw, show
    from lockstep.looking.watched import chosen_run, watch

    folder = chosen_run(args.run)
    if not (args.once or args.json) and sys.stdin.isatty() and sys.stdout.isatty():
        show(folder)
        return 0
    from rich.console import Console

    watched = watch(folder)
    console = Console(width=shutil.get_terminal_size((120, 24)).columns, height=_HEIGHT_OF_ONCE, color_system=None)
    console.print(draw(watched, console))
    emit(watched.as_json())
    return 0
