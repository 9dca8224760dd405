"""The verb `eval`: lockstep eval RUN."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from lockstep.cli.arguments import Parser, Prepared, add_json, add_trust, ranks, run_path
from lockstep.core.json_output import emit
from lockstep.core.near_runs import did_you_mean_run


def run(arguments: Sequence[str]) -> int:
    """Evaluate the weights that a run left, on the evaluation sets of its config."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read the arguments."""
    parser = Parser("eval", "Evaluates the model of a run on its evaluation sets, exactly, on any number of ranks.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="processes; default: the run's config")
    add_json(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)
    return Prepared(partial(_evaluate, args), name=f"eval-{args.run.name}", folder=args.run)


def _evaluate(args: argparse.Namespace) -> int:
    from lockstep.core.errors import ConfigError
    from lockstep.training.finished_run import evaluate_run

    if not args.run.exists():
        raise ConfigError(f"there is no folder {args.run}{did_you_mean_run(args.run)}")
    trust = {name: getattr(args, name) for name in ("trust_remote_code", "trust_run")}
    code, metrics = evaluate_run(args.run, args.ranks, **trust)
    if metrics is not None:
        emit({"run": str(args.run), "evaluation": metrics})
    return code
