"""lockstep verify RECIPE [--strategies all] [--ranks 1,2,4] [overrides]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli.words import CONFIG_EPILOG, Parser, add_config, add_trust, approved_config, path, split, whole
from lockstep.core.arguments import VerifyArguments

_EPILOG = f"""{CONFIG_EPILOG}
Runs the recipe under each strategy, on each number of ranks, in one micro-batch and in several, under its optimizer and
under SGD; compares losses, gradients and weights with one process on the same samples; and says of a difference where
it begins and what it is likely to come from. Exit codes: 0 all are the same run, 3 one isn't."""


def run(words: Sequence[str]) -> int:
    """Starts ranks of its own."""
    parser = Parser(
        "verify",
        "Proves that every strategy trains as one process does, on your model and data.",
        _EPILOG,
        "[RECIPE ...] [options] [overrides]",
    )
    default = VerifyArguments()
    add_config(parser)
    parser.add_argument("--strategies", default="all", metavar="all|A,B", help="by name, such as ddp,fsdp; default all")
    parser.add_argument(
        "--ranks", type=_numbers, default=default.ranks, metavar="1,2,4", help="processes to try each on"
    )
    parser.add_argument(
        "--steps", type=whole, default=default.steps, metavar="N", help="updates of each run; default 8"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default fp32")
    parser.add_argument("--html", type=path, metavar="FILE", help="the page; by default runs/verify-RECIPE.html")
    parser.add_argument("--json", action="store_true", help="stdout is a JSON list alone, an object a run")
    add_trust(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    loaded, name = approved_config(asked.config, overrides, parser.flags(), trusted=asked.trust_run)

    from lockstep.proof.command import verify

    arguments = VerifyArguments(
        asked.strategies, asked.ranks, asked.steps, asked.precision, asked.html, asked.json, asked.trust_remote_code
    )
    return verify(loaded, name, arguments)


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above 0 with commas between them."""
    wanted = "whole numbers above 0 with commas between them, such as 1,2,4"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return tuple(dict.fromkeys(int(part) for part in parts))
