"""lockstep plan RECIPE --ranks N [overrides]"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.words import (
    CONFIG_EPILOG,
    Parser,
    add_config,
    add_json,
    add_trust,
    add_untested,
    approved_config,
    ranks,
    short_overrides,
    size,
    split,
)
from lockstep.core.arguments import PlanArguments


def run(words: Sequence[str]) -> int:
    """Starts no process."""
    summary = "What a run will be: batch, steps, parameters, bytes per rank under every strategy."
    parser = Parser("plan", summary, CONFIG_EPILOG, "[RECIPE ...] [options] [overrides]")
    add_config(parser)
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="as if started on so many ranks")
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="that each rank has, such as 80GiB; this machine's otherwise"
    )
    add_json(parser)
    add_trust(parser)
    add_untested(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    loaded, name = approved_config(
        asked.config,
        [*overrides, *short_overrides(asked)],
        parser.flags(),
        trusted=asked.trust_run,
    )

    from lockstep.training.command import plan

    return plan(loaded, name, PlanArguments(asked.json, asked.trust_remote_code, asked.memory))
