"""lockstep eval RUN"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.words import Parser, add_json, add_trust, path, ranks
from lockstep.core.arguments import EvaluateArguments


def run(words: Sequence[str]) -> int:
    """The weights that the run left, on the evaluation sets of its config."""
    parser = Parser("eval", "Judges the model of a run on its evaluation sets, exactly, whatever the ranks.")
    parser.add_argument("run", type=path, metavar="RUN", help="the run's folder")
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="processes; by default those of the run's config")
    add_json(parser)
    add_trust(parser)
    asked = parser.parse_args(words)

    from lockstep.training.command import evaluate

    arguments = EvaluateArguments(asked.ranks, asked.json, asked.trust_remote_code, asked.trust_run)
    return evaluate(asked.run, arguments)
