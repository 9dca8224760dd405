"""The verb `eval`: lockstep eval RUN."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from lockstep.cli.arguments import Parser, Prepared, add_json, add_trust, ranks, run_path, whole
from lockstep.core.json_output import emit
from lockstep.core.near_runs import did_you_mean_run
from lockstep.core.ranks import RankEnvironment


def run(arguments: Sequence[str]) -> int:
    """Evaluate the weights that a run left, on the evaluation sets of its config."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read the arguments."""
    parser = Parser("eval", "Evaluates the model of a run on its evaluation sets, exactly, on any number of ranks.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="processes; default: the run's config")
    tasks = "on tasks of EleutherAI's lm-eval instead: names or YAML files, separated by commas"
    parser.add_argument("--lm-eval", metavar="TASKS", help=tasks)
    parser.add_argument("--limit", type=whole, metavar="N", help="of --lm-eval: samples of each task; default: all")
    add_json(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)
    if args.limit is not None and args.lm_eval is None:
        parser.error("--limit is for --lm-eval TASKS")
    if args.lm_eval is not None and (args.ranks is not None or RankEnvironment.read(os.environ).world_size > 1):
        parser.error("--lm-eval evaluates in one process: leave out --ranks, and launchers of ranks")
    return Prepared(partial(_evaluate, args), name=f"eval-{args.run.name}", folder=args.run)


def _evaluate(args: argparse.Namespace) -> int:
    from lockstep.core.errors import ConfigError

    if not args.run.exists():
        raise ConfigError(f"there is no folder {args.run}{did_you_mean_run(args.run)}")
    trust = {name: getattr(args, name) for name in ("trust_remote_code", "trust_run")}
    if args.lm_eval is None:
        from lockstep.training.finished_run import evaluate_run

        code, metrics = evaluate_run(args.run, args.ranks, **trust)
    else:
        from lockstep.training.finished_run import evaluate_by_lm_eval

        code, metrics = 0, evaluate_by_lm_eval(args.run, args.lm_eval.split(","), args.limit, **trust)
    if metrics is not None:
        emit({"run": str(args.run), "evaluation": metrics})
    return code
