"""The verb `completion`: prints a shell's completion script, which shtab makes from the verbs' parsers.

VERBS --> each verb's parser, caught when it parses --> one tree of argparse parsers --> shtab --> the script
schema --> --optim.lr, ... as flags of the verbs that take overrides
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn
from unittest.mock import patch

import shtab

from lockstep.cli.arguments import Parser
from lockstep.cli.launch_command import OF_JOBS
from lockstep.cli.launch_command import VERBS as VERBS_OF_LAUNCH
from lockstep.config import shape
from lockstep.config.recipes import overlays, recipes
from lockstep.config.shape import ValueShape
from lockstep.core.terminal import echo

_EPILOG = """\
  bash  lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep
  zsh   lockstep completion zsh > FOLDER/_lockstep        FOLDER is one of $fpath
  fish  lockstep completion fish > ~/.config/fish/completions/lockstep.fish
The script lists what this version has: print it again after an update."""
_PATH_TYPES = ("path", "path_or_address", "run_path")


def run(arguments: Sequence[str]) -> int:
    """Print the script."""
    parser = Parser("completion", "Prints a shell's completion script for verbs, flags, files and keys.", _EPILOG)
    shells = shtab.SUPPORTED_SHELLS
    parser.add_argument("shell", choices=shells, metavar="SHELL", help=", ".join(shells))
    args = parser.parse_args(arguments)
    echo(shtab.complete(_tree(), args.shell))
    return 0


def _tree() -> argparse.ArgumentParser:
    from lockstep.cli.main import VERBS

    root = argparse.ArgumentParser("lockstep")
    verbs = root.add_subparsers()
    for name, (module, summary) in VERBS.items():
        verb = import_module(f"lockstep.cli.{module}")
        commands = getattr(verb, "COMMANDS", {})
        own = _added(verbs, name, summary, getattr(verb, "plain", None) if commands else verb.run)
        inner = own.add_subparsers() if commands else None
        for command, of in commands.items():
            parser = _added(inner, command, of.summary, of.run)
            if name == "launch":
                parser.add_argument("verb", choices=[*VERBS_OF_LAUNCH, *OF_JOBS])
    return root


def _added(to: Any, name: str, summary: str, run: Callable[[Sequence[str]], int] | None) -> argparse.ArgumentParser:
    """Add a parser with the arguments of the one that `run` builds, and with the keys of the config if it reads one."""
    built = _built(run) if run else argparse.ArgumentParser()
    parser: argparse.ArgumentParser = to.add_parser(name, help=summary, parents=[built], add_help=False)
    for action in built._actions:
        if action.dest == "config":
            _complete(action, _recipe_or_file())
        elif getattr(action.type, "__name__", "") in _PATH_TYPES or action.metavar in ("INPUT", "FILE"):
            _complete(action, shtab.FILE)
    if "overrides" in (built.usage or ""):
        for key, words in _keys(shape.root(), "").items():
            parser.add_argument(f"--{key}", choices=words or None)
    return parser


class _Built(Exception):
    def __init__(self, parser: Parser) -> None:
        self.parser = parser


def _built(run: Callable[[Sequence[str]], int]) -> Parser:
    def caught(parser: Parser, *_: object) -> NoReturn:
        raise _Built(parser)

    try:
        with patch.object(Parser, "parse_args", caught):
            run(["--help"])
    except _Built as built:
        return built.parser
    raise AssertionError(f"{run} builds no parser")


def _complete(action: argparse.Action, how: object) -> None:
    action.complete = how  # type: ignore[attr-defined]  # where shtab looks


def _recipe_or_file() -> dict[str, Any]:
    """Return how shtab is to complete a recipe; where it can't offer both, files."""
    names = " ".join(recipe.name for recipe in (*recipes(), *overlays()))
    bash = f'_lockstep_recipe_or_file() {{ compgen -W \'{names}\' -- "$1"; compgen -f -- "$1"; }}'
    zsh = f"_lockstep_recipe_or_file() {{ compadd -- {names}; _files; }}"
    function = "_lockstep_recipe_or_file"
    return {**shtab.FILE, "bash": function, "zsh": function, "preamble": {"bash": bash, "zsh": zsh}}


def _keys(at: ValueShape, path: str) -> dict[str, list[str]]:
    """Return dotted keys that hold a value, each with its valid words; those below a free name are left out."""
    keys: dict[str, list[str]] = {}
    for section in at.sections():
        for name, inner in shape.fields(section).items():
            below = _keys(inner, f"{path}{name}.")
            words = [*inner.choices, *["true", "false"] * inner.boolean]
            for key, valid in (below or {f"{path}{name}": words}).items():
                keys[key] = list(dict.fromkeys([*keys.get(key, []), *valid]))
    return keys
