"""The verb `report`: lockstep report RUN."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import Parser, add_json, path, run_path
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Write one page that shows a run: finished, stopped or failed."""
    parser = Parser("report", "Writes a run as one self-contained HTML page: curves, figures, config.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--output", type=path, metavar="FILE", help="where to write; by default RUN/report.html")
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.looking.states import status_of
    from lockstep.monitor.folder import is_finished
    from lockstep.report import write_report

    written = write_report(args.run, args.output, status_of(args.run).sentence)
    echo(written)
    emit({"run": str(args.run), "report": str(written), "finished": is_finished(args.run)})
    return 0
