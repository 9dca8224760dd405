"""The verb `plan`: lockstep plan RECIPE --ranks N [overrides]."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import CONFIG_EPILOG, Parser, add_run, approved_config, size
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Print what follows from a config, without starting a process."""
    summary = "Shows batch, steps, parameters, and bytes per rank under every strategy, without starting a run."
    parser = Parser("plan", summary, CONFIG_EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "as if started on N ranks")
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="memory of each rank, such as 80GiB; by default this machine's"
    )
    args, overrides = parser.parse(arguments)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run)

    from lockstep.plan.plan import as_json, describe
    from lockstep.training.planning import plan_run

    plan = plan_run(loaded, args.memory, trust_remote_code=args.trust_remote_code)
    if args.json:
        emit(as_json(plan))
    else:
        echo(f"{name}\n{describe(plan)}")
    return 0
