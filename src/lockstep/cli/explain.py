"""The verb `explain`: lockstep explain RUN."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import Parser, add_json, run_path
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Explain how fast a run is, what limits it, what happened, and what to do next."""
    parser = Parser("explain", "Explains a run in ten sentences: its speed, what limits it, what to do next.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder, or its address")
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.report.explanation import explain, limits
    from lockstep.report.rank_history import read_rank_history
    from lockstep.report.run_data import read_run

    sentences = explain(args.run)
    if not args.json:
        for sentence in sentences:
            echo(sentence)
        return 0
    causes = limits(read_run(args.run), read_rank_history(args.run))
    emit(
        {
            "run": str(args.run),
            "sentences": sentences,
            "limits": [
                {"name": each.name, "share": each.share, "gain": each.gain, "fact": each.fact, "remedy": each.remedy}
                for each in causes
            ],
        }
    )
    return 0
