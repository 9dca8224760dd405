"""The verb `config`: lockstep config show | check | schema | import."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.cli.arguments import (
    CONFIG_EPILOG,
    Command,
    Parser,
    add_config,
    add_ranks,
    add_untested,
    read_config,
    run_command,
)
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo, plain_line

_WIDEST_COLUMN = 40


def run(arguments: Sequence[str]) -> int:
    """Run one of the commands."""
    return run_command("config", COMMANDS, arguments, CONFIG_EPILOG)


def _show(arguments: Sequence[str]) -> int:
    parser = _parser("show")
    parser.add_argument("--json", action="store_true", help="print one JSON object: from key to value and origin")
    args, overrides = parser.parse(arguments)
    loaded, _ = read_config(args.config, overrides)

    from lockstep.config.loading import values
    from lockstep.config.wording import yaml_like

    by_key = values(loaded.config)
    if args.json:
        emit({key: {"value": value, "from": loaded.origins[key]} for key, value in by_key.items()}, indent=2)
        return 0
    rows = [
        (key, value if isinstance(value, str) and value else yaml_like(value), loaded.origins[key])
        for key, value in by_key.items()
    ]
    first, second = (max(len(row[column]) for row in rows if len(row[column]) <= _WIDEST_COLUMN) for column in (0, 1))
    section = ""
    for key, value, origin in rows:
        if section and key.split(".")[0] != section:
            echo()
        section = key.split(".")[0]
        echo(plain_line(f"{key:<{first}}  {value:<{second}}  {origin}"))
    return 0


def _check(arguments: Sequence[str]) -> int:
    parser = _parser("check")
    add_ranks(parser, "as if started on N ranks")
    add_untested(parser)
    args, overrides = parser.parse(arguments)
    loaded, _ = read_config(args.config, overrides)

    from lockstep.data.columns import check_local_columns
    from lockstep.plan.plan import check_alone, check_on_ranks

    check_alone(loaded.config)
    if not loaded.runs:  # the config of another user's run may name any file
        check_local_columns(loaded.config)
    if isinstance(number := loaded.config.launch.ranks, int):
        check_on_ranks(loaded.config, number)
    echo("ok")
    return 0


def _schema(arguments: Sequence[str]) -> int:
    Parser("config schema", "Prints the JSON Schema for completion in editors.").parse_args(arguments)

    from lockstep.config.reference import json_schema

    echo(json.dumps(json_schema(), indent=2))
    return 0


def _import(arguments: Sequence[str]) -> int:
    from lockstep.cli import config_import

    return config_import.run(arguments)


COMMANDS = {
    "show": Command("print every value and where it comes from", _show),
    "check": Command("print ok or all errors; with --ranks N, also those on N ranks", _check),
    "schema": Command("print the JSON Schema for completion in editors", _schema),
    "import": Command("convert another tool's config, and report what became of each key", _import),
}


def _parser(command: str) -> Parser:
    summary = COMMANDS[command].summary
    summary = f"{summary[0].upper()}{summary[1:]}."
    parser = Parser(f"config {command}", summary, CONFIG_EPILOG, "[RECIPE ...] [overrides]")
    add_config(parser)
    return parser
