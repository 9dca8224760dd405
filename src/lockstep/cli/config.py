"""lockstep config show | check | schema | deepspeed | import"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lockstep.cli.words import (
    CONFIG_EPILOG,
    Parser,
    add_config,
    add_trust,
    add_untested,
    approved_config,
    ranks,
    read_config,
    short_overrides,
    split,
)
from lockstep.core.closest import closest_match
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo, plain_line

_WAYS = {
    "show": "every value, and where it came from",
    "check": "ok, or all that is wrong; with --ranks, on so many ranks",
    "schema": "the JSON Schema that editors complete from",
    "deepspeed": "the DeepSpeed config of the run, as DeepSpeed alone would be given it",
    "import": "another tool's config as one of Lockstep's, and what became of each key",
}


def run(words: Sequence[str]) -> int:
    """Delegates to one of them."""
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {way:<9}  {summary}" for way, summary in _WAYS.items())
        echo(f"usage: lockstep config {{{','.join(_WAYS)}}} ...\n\n{lines}\n\n{CONFIG_EPILOG}")
        return 0 if words else 2
    way, *rest = words
    if way == "show":
        return _show(rest)
    if way == "check":
        return _check(rest)
    if way == "schema":
        return _schema(rest)
    if way == "deepspeed":
        return _deepspeed(rest)
    if way == "import":
        from lockstep.cli import config_import

        return config_import.run(rest)
    near = closest_match(way, _WAYS)
    meant = f"; did you mean {near}?" if near else f"; there are {', '.join(_WAYS)}"
    echo(f"lockstep: config can't {way}{meant}", file=sys.stderr)
    return 2


def _show(words: Sequence[str]) -> int:
    parser = _parser("show")
    parser.add_argument("--json", action="store_true", help="stdout is a JSON object alone: key to value and origin")
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    loaded, _ = read_config(asked.config, overrides, parser.flags())

    from lockstep.config.loading import values
    from lockstep.config.wording import yaml_like

    found = values(loaded.config)
    if asked.json:
        told = {key: {"value": value, "from": loaded.origins[key]} for key, value in found.items()}
        emit(told, indent=2)
        return 0
    _print_table([
        (key, value if isinstance(value, str) and value else yaml_like(value), loaded.origins[key])
        for key, value in found.items()
    ])  # fmt: skip
    return 0


def _print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    """Key, value, origin; an empty line between the sections."""
    first, second = (max(len(row[column]) for row in rows if len(row[column]) <= 40) for column in (0, 1))
    section = ""
    for key, value, origin in rows:
        if section and key.split(".")[0] != section:
            echo()
        section = key.split(".")[0]
        echo(plain_line(f"{key:<{first}}  {value:<{second}}  {origin}"))


def _check(words: Sequence[str]) -> int:
    parser = _parser("check")
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="as if started on so many ranks")
    add_untested(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    loaded, _ = read_config(asked.config, [*overrides, *short_overrides(asked)], parser.flags())
    if loaded.config.parallel.strategy == "deepspeed":
        from lockstep.config.deepspeed import check_alone

        check_alone(loaded.config)
    if isinstance(number := loaded.config.launch.ranks, int):
        from lockstep.plan.plan import check_on_ranks

        check_on_ranks(loaded.config, number)
    echo("ok")
    return 0


def _schema(words: Sequence[str]) -> int:
    Parser("config schema", "The JSON Schema that editors complete from.").parse_args(words)

    from lockstep.config.reference import json_schema

    echo(json.dumps(json_schema(), indent=2))
    return 0


def _deepspeed(words: Sequence[str]) -> int:
    parser = _parser("deepspeed")
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="as if started on so many ranks")
    add_trust(parser)
    add_untested(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    chosen = [*overrides, *short_overrides(asked)]
    loaded, _ = approved_config(asked.config, chosen, parser.flags(), trusted=asked.trust_run)

    from lockstep.training.command import deepspeed_config

    return deepspeed_config(loaded, trust_remote_code=asked.trust_remote_code)


def _parser(way: str) -> Parser:
    summary = _WAYS[way][0].upper() + _WAYS[way][1:] + "."
    parser = Parser(f"config {way}", summary, CONFIG_EPILOG, "[RECIPE ...] [overrides]")
    add_config(parser)
    return parser
