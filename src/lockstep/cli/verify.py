"""The verb `verify`: lockstep verify RECIPE [--strategies all] [--ranks 1,2,4] [overrides]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lockstep.cli.arguments import (
    CONFIG_EPILOG,
    Parser,
    Prepared,
    add_config,
    add_json,
    add_trust,
    approved_config,
    path,
    whole,
)

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

_EPILOG = f"""{CONFIG_EPILOG}
Runs the recipe under each strategy on each number of ranks, with one micro-batch and with several, under its optimizer
and under SGD. Compares losses, gradients and weights with a single process on the same samples, and reports the first
deviation of each run with its likely cause. Exit codes: 0 all runs match, 3 one deviates."""


def run(arguments: Sequence[str]) -> int:
    """Compare every strategy with the single process, in ranks of this machine."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read and check the arguments."""
    summary = "Checks that every strategy trains like a single process, on your model and data."
    parser = Parser("verify", summary, _EPILOG, "[RECIPE ...] [options] [overrides]")
    add_config(parser)
    parser.add_argument("--strategies", default="all", metavar="all|A,B", help="names, such as ddp,fsdp; default all")
    text = "numbers of processes for each strategy"
    parser.add_argument("--ranks", type=_numbers, default=(1, 2, 4), metavar="1,2,4", help=text)
    parser.add_argument("--steps", type=whole, default=8, metavar="N", help="updates of each run; default %(default)s")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default %(default)s")
    parser.add_argument("--html", type=path, metavar="FILE", help="of the page; default runs/verify-RECIPE.html")
    add_json(parser, "list, an object for each run,")
    add_trust(parser)
    args, overrides = parser.parse(arguments)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run)
    return Prepared(partial(_verify, args, loaded, name), loaded.config, f"verify-{name}")


def _verify(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.proof.command import verify

    chosen = (args.strategies, args.ranks, args.steps, args.precision)
    return verify(loaded, name, *chosen, page=args.html, as_json=args.json, trust_remote_code=args.trust_remote_code)


def _numbers(text: str) -> tuple[int, ...]:
    """Return whole numbers above 0, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers above 0 separated by commas, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))
