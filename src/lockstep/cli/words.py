"""The words behind a verb: its own flags, names and files, and overrides of the config.

    train digits more.yaml --ranks 2 --optim.lr 1e-3 run.steps=5 --model.compile
          names            flag      override        override    override (true)

A flag that the verb doesn't have is an override; if it is no key either, the config says so, with what was meant.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lockstep.config.override import Override
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.local_paths import url_refusal
from lockstep.core.terminal import echo

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

_ASSIGNMENT = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*=.*", re.DOTALL)

CONFIG_EPILOG = """\
RECIPE is a recipe (`lockstep recipes`) or a YAML or JSON file; further files are laid over it. Overrides:
  --section.key value, --section.key=value or section.key=value      such as --optim.lr 3e-4
Environment variables LOCKSTEP_SECTION__KEY come between the two. `lockstep config show` tells what came from where."""


class Parser(argparse.ArgumentParser):
    """argparse, with the exit code and the wording of the rest, and no abbreviations."""

    def __init__(self, verb: str, summary: str, epilog: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=f"lockstep {verb}",
            usage=f"lockstep {verb} {usage}" if usage else None,
            description=summary,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        echo(f"lockstep: {message.removeprefix('argument ')}\n{self.format_usage().strip()}", file=sys.stderr)
        raise SystemExit(2)

    def flags(self) -> dict[str, bool]:
        """Every flag, and whether it takes a value."""
        return {
            flag: action.nargs != 0 for action in self._actions for flag in action.option_strings if flag[1:2] == "-"
        }


def split(words: Sequence[str], flags: dict[str, bool]) -> tuple[list[str], list[Override]]:
    """What is the verb's own, and the overrides, both in their order."""
    own: list[str] = []
    overrides: list[Override] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        if flag in flags or (word.startswith("-") and not word.startswith("--")):
            own.append(word)
            if flags.get(flag) and not equals and rest:
                own.append(rest.pop(0))
        elif word.startswith("--") and len(word) > 2:
            value = rest.pop(0) if not equals and rest and _is_value(rest[0]) else None
            overrides.append(Override(flag[2:], value) if not equals else Override.parse(word))
        elif _ASSIGNMENT.fullmatch(word):
            overrides.append(Override.parse(word))
        else:
            own.append(word)
    return own, overrides


def _is_value(word: str) -> bool:
    return not word.startswith("--") and not _ASSIGNMENT.fullmatch(word)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The positional names of recipes and files."""
    parser.add_argument("config", nargs="*", metavar="RECIPE", help="a recipe or files; by default stdlib-lm")


def read_config(
    names: Sequence[str], overrides: Sequence[Override], flags: Iterable[str] = ()
) -> tuple[LoadedConfig, str]:
    """The config, to be looked at, and what a run of it is called. Raises ConfigError; `flags` are what else might have
    been meant."""
    check_flags(overrides, flags)
    with _no_collections():
        from lockstep.config.loading import load
        from lockstep.config.recipes import resolve_all

        found = resolve_all(names)
        loaded = load([one.path for one in found], overrides, of_runs=[one.path for one in found if one.of_run])
    for note in loaded.notes:
        echo(f"lockstep: {note}", file=sys.stderr)
    return loaded, found[0].name


def approved_config(
    names: Sequence[str],
    overrides: Sequence[Override],
    flags: Iterable[str] = (),
    *,
    trusted: bool,
    writes: bool = False,
) -> tuple[LoadedConfig, str]:
    """As `read_config`, to be acted on. Raises ConfigError, too, if it is somebody else's and `trusted` is not said."""
    loaded, name = read_config(names, overrides, flags)

    from lockstep.config.approval import approved

    return replace(loaded, config=approved(loaded, trusted=trusted, writes=writes)), name


@contextmanager
def _no_collections() -> Iterator[None]:
    """Building the schema makes many objects and no garbage; looking for it took an eighth of a config's 0.2 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_flags(overrides: Sequence[Override], flags: Iterable[str]) -> None:
    """A flag without a dot that is nearly one of the verb's."""
    problems = []
    for override in overrides:
        near = difflib.get_close_matches(override.place, list(flags), n=1, cutoff=0.8)
        if "." not in override.key and near:
            problems.append(Problem(override.place, "", f"there is no such flag; did you mean {near[0]}?"))
    if problems:
        raise ConfigError(problems)


# --- values of flags ------------------------------------------------------------------------------------------------


def ranks(text: str) -> int | str:
    """`auto` or a whole number above 0."""
    return "auto" if text == "auto" else whole(text, "a whole number above 0, or auto")


def whole(text: str, wanted: str = "a whole number above 0") -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(text)


def path(text: str) -> Path:
    """A path of a file system."""
    refusal = url_refusal(text)
    if refusal is not None:
        raise argparse.ArgumentTypeError(refusal)
    return Path(text)


def size(text: str) -> int:
    """Bytes: 80GiB, 80GB, 24G (GiB, as memory is sold), or a number of them of a MiB or more."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0; write 80GiB, 80GB or a number of bytes")
    number, prefix, binary, byte = found.groups()
    if not (prefix or byte) and float(number) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} would be {text} bytes; write {text}GiB, or {text}B for bytes")
    base = 1000 if byte and not binary else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def step(text: str) -> int:
    """A whole number of 0 or more."""
    return seed(text)


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def temperature(text: str) -> float:
    """A finite number of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return number


def short_overrides(asked: argparse.Namespace) -> list[Override]:
    """`--ranks N` is short for `--launch.ranks N`, `--allow-untested` for `--run.allow_untested true`."""
    found = [] if asked.ranks is None else [Override("launch.ranks", str(asked.ranks), "--ranks")]
    return [*found, *([Override("run.allow_untested", "true", "--allow-untested")] if asked.allow_untested else [])]


def add_untested(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-untested", action="store_true", help="try what was never tested together")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="stdout is a JSON object alone; all else goes to stderr")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Whose code may run."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let code that comes with a downloaded model run"
    )
    parser.add_argument(
        "--trust-run", action="store_true", help="let code run that the config of somebody else's run names"
    )
