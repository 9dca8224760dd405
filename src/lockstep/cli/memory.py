"""The verb `memory`: lockstep memory RECIPE [--modes none,full] [--steps N] [overrides]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from lockstep.cli.arguments import CONFIG_EPILOG, Parser, Prepared, add_run, approved_config, whole
from lockstep.core.json_output import emit

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

_EPILOG = f"""{CONFIG_EPILOG}
Trains a few updates of the recipe in each mode, each in new processes: without any saving, with each mode of activation
checkpointing, with the loss in chunks, and so on. Shows the peak memory of an update in addition to model and
optimizer, and the time of an update. Memory is counted by torch on a GPU, and by torch's allocator on the CPU."""


def run(arguments: Sequence[str]) -> int:
    """Measure each mode in ranks of this machine."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read and check the arguments."""
    summary = "Measures what each way to save memory saves, and what it costs, on your model and data."
    parser = Parser("memory", summary, _EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "processes on this machine", "list, an object for each mode,")
    parser.add_argument("--modes", default="all", metavar="all|A,B", help="names; default %(default)s")
    parser.add_argument("--steps", type=whole, default=5, metavar="N", help="timed updates; default %(default)s")
    args, overrides = parser.parse(arguments)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run)
    return Prepared(partial(_measure, args, loaded, name), loaded.config, f"memory-{name}")


def _measure(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.measuring.command import measure_modes

    rows = measure_modes(loaded, name, args.modes, args.steps, trust_remote_code=args.trust_remote_code)
    if args.json:
        emit([asdict(row) for row in rows])
    return 0
