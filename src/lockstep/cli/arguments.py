"""The arguments of a verb: its flags, names and files, and overrides of the config.

train digits more.yaml --ranks 2 --optim.lr 1e-3 run.steps=5 --model.compile
      names            flag      override        override    override (true)
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from lockstep.config.override import Override
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.local_paths import url_refusal
from lockstep.core.nodes import checked_nodes
from lockstep.core.process_settings import paused_collection
from lockstep.core.terminal import command_line, echo
from lockstep.stores.addresses import checked_address, is_address

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config

_ASSIGNMENT = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*=.*", re.DOTALL)
_DOTTED = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)+=.*", re.DOTALL)  # after a flag, `a=b` is its value

CONFIG_EPILOG = """\
RECIPE is a recipe (`lockstep recipes`) or a YAML or JSON file; further files are merged over it. Overrides:
  --section.key value, --section.key=value or section.key=value      such as --optim.lr 3e-4
Environment variables LOCKSTEP_SECTION__KEY come between the two. `lockstep config show` prints each value's origin."""

_collections: list[dict[str, None]] = []  # of `collected_notes`, the innermost last


class Command(NamedTuple):
    """A command below a verb, such as `ckpt ls`."""

    summary: str
    run: Callable[[Sequence[str]], int]
    usage: str = ""


def run_command(verb: str, commands: Mapping[str, Command], arguments: Sequence[str], epilog: str = "") -> int:
    """Run the command of `verb` that the first argument names, or list all commands."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, commands))
        lines = "\n".join(
            f"  {name} {of.usage}\n      {of.summary}" if of.usage else f"  {name:<{width}}  {of.summary}"
            for name, of in commands.items()
        )
        echo(f"usage: lockstep {verb} {{{','.join(commands)}}} ...\n\n{lines}" + (f"\n\n{epilog}" if epilog else ""))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        raise ConfigError(f"{verb} has no command {name!r}; {did_you_mean(name, commands)}")
    return commands[name].run(rest)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A verb's command line, read and checked, so that only its execution is left: here, or by a launcher elsewhere.

    Attributes:
        execute: Runs the verb, and returns the exit code.
        name: What a run with it is called.
        folder: The folder of the run, if the arguments or the config name it.
        nodes: Whether it can be started on several hosts.
        ranks: Ranks on each host, if the arguments state them; the config may do so, too.
        restart: The arguments that resume the same run; None: the same ones.
    """

    execute: Callable[[], int]
    config: Config | None = None
    name: str = ""
    folder: Path | None = None
    starts_run: bool = False
    nodes: bool = False
    ranks: int | None = None
    restart: tuple[str, ...] | None = None
    trust_remote_code: bool = False


class Parser(argparse.ArgumentParser):
    """An argparse parser with Lockstep's exit code and wording of errors, and without abbreviations."""

    def __init__(self, verb: str, summary: str, epilog: str = "", usage: str | None = None) -> None:
        prog, formatter = f"lockstep {verb}", argparse.RawDescriptionHelpFormatter
        usage = f"{prog} {usage}" if usage else None
        super().__init__(prog, usage, summary, epilog, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        echo(f"lockstep: {message.removeprefix('argument ')}\n{self.format_usage().strip()}", file=sys.stderr)
        raise SystemExit(2)

    def flags(self) -> dict[str, bool]:
        """Return every flag, and whether it takes a value."""
        named = [(flag, action.nargs != 0) for action in self._actions for flag in action.option_strings]
        return {flag: takes_value for flag, takes_value in named if flag.startswith("--")}

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Override]]:
        """Return the verb's arguments and the overrides, including abbreviated ones.

        Raises:
            ConfigError: An override without a dot resembles a flag.
        """
        flags = self.flags()
        own, overrides = split(arguments, flags)
        args = self.parse_args(own)
        for override in overrides:
            near = difflib.get_close_matches(override.place, list(flags), n=1, cutoff=0.8)
            if "." not in override.key and near:
                raise ConfigError(Problem(override.place, "", f"there is no such flag; did you mean {near[0]}?"))
        given = vars(args)
        for name in ("ranks", *HOST_FLAGS):
            if given.get(f"launch_{name}") is not None:
                flag = f"--{name.replace('_', '-')}"
                overrides.append(Override(f"launch.{name}", str(given[f"launch_{name}"]), flag))
        if given.get("allow_untested"):
            overrides.append(Override("run.allow_untested", "true", "--allow-untested"))
        return args, overrides


def split(arguments: Sequence[str], flags: dict[str, bool]) -> tuple[list[str], list[Override]]:
    """Return the verb's arguments and the overrides, both in their order."""
    own: list[str] = []
    overrides: list[Override] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        if flag in flags or (word.startswith("-") and not word.startswith("--")):
            own.append(word)
            if flags.get(flag) and not equals and rest:
                own.append(rest.pop(0))
        elif word.startswith("--") and len(word) > 2:
            has_value = not equals and rest and not rest[0].startswith("--") and not _DOTTED.fullmatch(rest[0])
            value = rest.pop(0) if has_value else None
            overrides.append(Override(flag[2:], value) if not equals else Override.parse(word))
        elif _ASSIGNMENT.fullmatch(word):
            overrides.append(Override.parse(word))
        else:
            own.append(word)
    return own, overrides


def read_config(names: Sequence[str], overrides: Sequence[Override]) -> tuple[LoadedConfig, str]:
    """Return the config, to be shown only, and the name of a run with it. Raises ConfigError."""
    with paused_collection():  # building the schema makes no garbage, and the search took 12 % of the 0.2 s
        from lockstep.config.loading import load
        from lockstep.config.recipes import resolve_all

        recipes = resolve_all(names)
        of_runs = [recipe.path for recipe in recipes if recipe.of_run]
        loaded = load([recipe.path for recipe in recipes], overrides, of_runs=of_runs)
    for note in loaded.notes:
        if _collections:
            _collections[-1][f"lockstep: {note}"] = None
        else:
            echo(f"lockstep: {note}", file=sys.stderr)
    return loaded, recipes[0].name


def approved_config(
    names: Sequence[str], overrides: Sequence[Override], *, trusted: bool, writes: bool = False
) -> tuple[LoadedConfig, str]:
    """Return the same as `read_config`, to be executed.

    Raises:
        ConfigError: The config is wrong, or belongs to another user's run and `trusted` is False.
    """
    loaded, name = read_config(names, overrides)

    from lockstep.config.trust import approved

    return replace(loaded, config=approved(loaded, trusted=trusted, writes=writes)), name


@contextmanager
def collected_notes() -> Iterator[dict[str, None]]:
    """Collect the notes on configs that are read in the block, each once, instead of printing them."""
    notes: dict[str, None] = {}
    _collections.append(notes)
    try:
        yield notes
    finally:
        _collections.pop()


# --- flags of several verbs -----------------------------------------------------------------------------------------


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the positional names of recipes and files."""
    parser.add_argument("config", nargs="*", metavar="RECIPE", help="a recipe or files; by default stdlib-lm")


def add_ranks(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--ranks N`, short for `--launch.ranks N`."""
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", dest="launch_ranks", help=text)


HOST_FLAGS = ("nodes", "rendezvous", "node_rank", "job_id")
"""Keys of `launch` that have a flag of their own where hosts are joined."""


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add `--nodes N` and what belongs to it, short for keys of `launch`."""
    text = "hosts, each with this command; MIN:MAX: trains while some are missing"
    parser.add_argument("--nodes", type=nodes, metavar="N", dest="launch_nodes", help=text)
    text = "where hosts meet: an address of node 0"
    parser.add_argument("--rendezvous", metavar="HOST:PORT", dest="launch_rendezvous", help=text)
    text = "rank of this host; default: by order of arrival"
    parser.add_argument("--node-rank", type=count, metavar="R", dest="launch_node_rank", help=text)
    parser.add_argument("--job-id", metavar="ID", dest="launch_job_id", help="id of the job, the same on all hosts")


def refuse_hosts_without_number(args: argparse.Namespace, nodes: int | str) -> None:
    """Raise ConfigError if a flag is about several hosts, and there is only one: each would do all the work."""
    for name in HOST_FLAGS[1:]:
        if nodes == 1 and args.launch_nodes is None and getattr(args, f"launch_{name}") is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for several hosts; give --nodes N too")


def add_untested(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-untested`, short for `--run.allow_untested true`."""
    parser.add_argument("--allow-untested", action="store_true", help="allow combinations that were never tested")


def add_json(parser: argparse.ArgumentParser, value: str = "object") -> None:
    """Add `--json`, which prints one value: an object, or a list of objects."""
    text = f"print one JSON {value} on stdout, everything else on stderr"
    parser.add_argument("--json", action="store_true", help=text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the flags that allow code to run."""
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a downloaded model")
    text = "let another user's run execute its code and reach outside of its folder"
    parser.add_argument("--trust-run", action="store_true", help=text)


def add_run(parser: argparse.ArgumentParser, ranks_text: str, json_value: str = "object") -> None:
    """Add the arguments of all verbs that start or describe a run."""
    add_config(parser)
    add_ranks(parser, ranks_text)
    add_json(parser, json_value)
    add_trust(parser)
    add_untested(parser)


# --- values of flags ------------------------------------------------------------------------------------------------


def ranks(text: str) -> int | str:
    """Return `auto` or a whole number above 0."""
    return "auto" if text == "auto" else whole(text, "a whole number above 0, or auto")


def whole(text: str, wanted: str = "a whole number above 0") -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(text)


def nodes(text: str) -> int | str:
    """Return a number of hosts, or a range of them as it is."""
    try:
        return checked_nodes(text) if ":" in text else whole(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def path(text: str) -> Path:
    """Return a path; refuse a URL."""
    if (refusal := url_refusal(text)) is not None:
        raise argparse.ArgumentTypeError(refusal)
    return Path(text)


def path_or_address(text: str) -> Path | str:
    """Return a path, or the address of an object store as text."""
    if not is_address(text):
        return Path(text)
    try:
        return checked_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_path(text: str) -> Path:
    """Return the folder of a run."""
    if is_address(text):
        listing = command_line("lockstep", "ckpt", "ls", text)
        raise argparse.ArgumentTypeError(f"a run's folder is on a disk; {listing} lists the checkpoints there")
    return Path(text)


def size(text: str) -> int:
    """Return bytes for 80GiB, 80GB, 24G (GiB), or a number of at least a MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0 or (not (match[2] or match[4]) and float(match[1]) < 1 << 20):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 80GiB, 80GB, or a number with B for bytes")
    number, prefix, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def count(text: str) -> int:
    """Return a whole number of 0 or more, such as a step or a seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def port(text: str) -> int:
    """Return a port, or 0 for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; ports are 1 to 65535, and 0 is any")
    return int(text)


def temperature(text: str) -> float:
    """Return a finite number of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return number


def share(text: str) -> float:
    """Return a number above 0 and at most 1."""
    number = temperature(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return number
