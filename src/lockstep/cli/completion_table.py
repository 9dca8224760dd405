"""The table of everything that a shell can complete, collected from the verbs' parsers and the config's schema.

    python -m lockstep.cli.completion_table > src/lockstep/cli/completion.json

A keypress reads the committed table, because importing every verb and the schema would take too long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

from lockstep.cli import launch
from lockstep.cli.arguments import Command, Parser
from lockstep.cli.launch_command import OF_JOBS
from lockstep.cli.launch_command import VERBS as VERBS_OF_LAUNCH
from lockstep.cli.main import VERBS
from lockstep.config import reference, shape
from lockstep.config.init_templates import STARTS
from lockstep.config.recipes import overlays, recipes
from lockstep.config.shape import ValueShape

_WORDS_OF_FLAGS = {"--ranks": ["auto"], "--strategies": ["all"], "--modes": ["all"]}
_WORDS_OF_POSITIONALS = {"kind": list(STARTS)}
_FILE_METAVARS = ("INPUT", "FILE")


def table() -> dict[str, Any]:
    """Return the contents of `completion.json`."""
    return {
        "commands": {verb: _command(module, summary) for verb, (module, summary) in VERBS.items()},
        "keys": _keys(shape.root(), ""),
        "recipes": {
            recipe.name: _shortened(recipe.description or "merged over a recipe")
            for recipe in (*recipes(), *overlays())
        },
    }


# --- verbs and flags ------------------------------------------------------------------------------------------------


def _command(module: str, summary: str) -> dict[str, Any]:
    verb = import_module(f"lockstep.cli.{module}")
    commands: dict[str, Command] | None = getattr(verb, "COMMANDS", None)
    if commands is None:
        return {"help": _shortened(summary), **_arguments(_parser(verb.run, []))}
    plain: Callable[[Sequence[str]], int] | None = getattr(verb, "plain", None)  # of a verb that may have no command
    return {
        "help": _shortened(summary),
        **(_arguments(_parser(plain, [])) if plain is not None else {}),
        "commands": {
            name: {"help": _shortened(command.summary), **_arguments(_parser(command.run, [])), **_launched(verb)}
            for name, command in commands.items()
        },
    }


def _launched(verb: ModuleType) -> dict[str, Any]:
    """Return the words that follow the flags of a launcher."""
    return {"verbs": [*VERBS_OF_LAUNCH], "of_jobs": [*OF_JOBS]} if verb is launch else {}


class _Built(Exception):
    def __init__(self, parser: Parser) -> None:
        self.parser = parser


def _parser(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> Parser:
    """Return the parser that the verb builds, by catching it when it parses."""

    def caught(parser: Parser, *_: object) -> NoReturn:
        raise _Built(parser)

    try:
        with patch.object(Parser, "parse_args", caught):
            run([*words, "--help"])
    except _Built as built:
        return built.parser
    raise AssertionError(f"{words} builds no parser")


def _arguments(parser: Parser) -> dict[str, Any]:
    actions = parser._actions
    flags = {flag: _flag(parser, action) for action in actions for flag in action.option_strings if flag[1:2] == "-"}
    positionals = [_positional(action) for action in actions if not action.option_strings]
    return {"flags": flags, "positionals": positionals, "overrides": "overrides" in (parser.usage or "")}


def _flag(parser: Parser, action: argparse.Action) -> dict[str, Any]:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    entry: dict[str, Any] = {"help": _shortened(text)}
    if action.nargs == 0:
        return entry
    words = list(action.choices or _WORDS_OF_FLAGS.get(action.option_strings[0], []))
    return {**entry, "takes": {"words": words, "files": _is_path(action)}}


def _positional(action: argparse.Action) -> dict[str, Any]:
    words = list(action.choices or _WORDS_OF_POSITIONALS.get(action.dest, []))
    recipe = action.dest == "config"
    repeats = action.nargs in ("*", "+")
    return {"words": words, "recipes": recipe, "files": recipe or _is_path(action), "repeats": repeats}


def _is_path(action: argparse.Action) -> bool:
    named = action.metavar in _FILE_METAVARS or "a folder or a name" in (action.help or "")
    return named or getattr(action.type, "__name__", "") in ("path", "path_or_address", "run_path")


# --- keys of the config ---------------------------------------------------------------------------------------------


def _keys(at: ValueShape, path: str) -> dict[str, dict[str, Any]]:
    """Return dotted keys that hold a value; `NAME` stands for a free name, and kinds are merged."""
    entries: dict[str, dict[str, Any]] = {}
    if at.values and at.values.sections():
        entries |= _keys(at.values, f"{path}NAME.")
    for section in at.sections():
        for name, inner in shape.fields(section).items():
            key = f"{path}{name}"
            if inner.sections() or (inner.values and inner.values.sections()):
                _merge(entries, _keys(inner, f"{key}."))
            else:
                text = "" if name == "kind" else _shortened(reference.description(section, name))
                _merge(entries, {key: {"help": text, **_value(inner)}})
    return entries


def _merge(entries: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]]) -> None:
    for key, entry in more.items():
        known = entries.setdefault(key, entry)
        known["words"] = list(dict.fromkeys([*known["words"], *entry["words"]]))
        known["files"] = known["files"] or entry["files"]


def _value(at: ValueShape) -> dict[str, Any]:
    words = [str(choice) for choice in at.choices]
    words += ["true", "false"] * at.boolean + ["null"] * at.nullable
    return {"words": words, "files": at.text or bool(at.items and at.items.text)}


def _shortened(text: str) -> str:
    """Return the first clause, on one line, at most 70 characters long."""
    line = " ".join(text.split()).split(". ")[0].rstrip(".")
    return line if len(line) <= 70 else line[:67].rstrip() + "..."


if __name__ == "__main__":
    sys.stdout.write(json.dumps(table(), indent=1, ensure_ascii=True) + "\n")
