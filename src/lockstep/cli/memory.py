"""lockstep memory RECIPE [--modes none,full] [--steps N] [overrides]"""

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
    split,
    whole,
)
from lockstep.core.arguments import MemoryArguments

_EPILOG = f"""{CONFIG_EPILOG}
Trains a few updates of the recipe in each mode, in processes of their own: as without any saving, with each mode of
activation checkpointing, with the loss in chunks, and so on. Shows what an update needs at its peak, above what model
and optimizer hold, and how long it takes. On a GPU torch's own count, on the CPU that of torch's allocator."""


def run(words: Sequence[str]) -> int:
    """Starts ranks of its own."""
    default = MemoryArguments()
    summary = "Measures what each way to save memory saves, and what it costs, on your model and data."
    parser = Parser("memory", summary, _EPILOG, "[RECIPE ...] [options] [overrides]")
    add_config(parser)
    parser.add_argument("--modes", default=default.modes, metavar="all|A,B", help="by name; default all")
    parser.add_argument(
        "--steps", type=whole, default=default.steps, metavar="N", help="updates that are timed; default 5"
    )
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="processes on this machine")
    add_json(parser)
    add_trust(parser)
    add_untested(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    chosen = [*overrides, *short_overrides(asked)]
    loaded, name = approved_config(asked.config, chosen, parser.flags(), trusted=asked.trust_run)

    from lockstep.measuring.command import memory

    return memory(loaded, name, MemoryArguments(asked.modes, asked.steps, asked.json, asked.trust_remote_code))
