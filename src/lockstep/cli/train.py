"""lockstep train RECIPE [overrides]"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.words import (
    CONFIG_EPILOG,
    Parser,
    add_config,
    add_json,
    add_trust,
    ranks,
    ranks_override,
    read_config,
    split,
)
from lockstep.core.arguments import TrainArguments


def run(words: Sequence[str]) -> int:
    """Checks the config before any process exists."""
    parser = Parser("train", "Trains a recipe or a config file.", CONFIG_EPILOG, "[RECIPE ...] [options] [overrides]")
    add_config(parser)
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="processes on this machine; auto: one a GPU")
    add_json(parser)
    add_trust(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    loaded, name = read_config(asked.config, [*overrides, *ranks_override(asked.ranks)], parser.flags())

    from lockstep.training.command import train

    return train(loaded, name, TrainArguments(json=asked.json, trust_remote_code=asked.trust_remote_code))
