"""lockstep config import FILE: another tool's config as ours, and what became of each of its keys.

    args.json  -->  YAML on stdout (or --to FILE)    the keys on stderr (with --to: on stdout)

Nothing is written where a key would be lost that changes the run, unless --lenient says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lockstep.cli.words import Parser, path, whole
from lockstep.core.errors import ConfigError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo, plain_line

if TYPE_CHECKING:
    from lockstep.config.importing import Finding, Imported

_SUMMARY = (
    "A script's YAML, a DeepSpeed JSON, HF TrainingArguments or Accelerate's config, as a config of Lockstep; each\n"
    "key is listed as taken, derived, to do, or not needed and why. Overrides (model.kind=transformer) are added."
)
_EPILOG = """\
Exit code 2, and nothing written, where the file asks for what is not there or not known; --lenient leaves that out.
What no file says, such as your model and data, is named in the end; overrides say it:
  lockstep config import args.json --ranks 8 model.kind=huggingface model.task=causal-lm model.pretrained=gpt2"""


def run(words: Sequence[str]) -> int:
    """The verb; `words` are what follows it."""
    parser = Parser("config import", _SUMMARY, _EPILOG, "FILE [flags] [overrides]")
    parser.add_argument("file", type=path, metavar="FILE", help="YAML or JSON; a pickle is refused")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=("yaml", "deepspeed", "trainer", "accelerate"),
        help="by default as its words tell",
    )
    parser.add_argument(
        "--ranks", type=whole, metavar="N", help="on how many ranks, on all machines, it was meant to run"
    )
    parser.add_argument("--to", type=path, metavar="FILE", help="write the config there; by default to stdout")
    parser.add_argument("--force", action="store_true", help="--to may overwrite")
    parser.add_argument("--lenient", action="store_true", help="leave out what is not there or not known")
    parser.add_argument("--json", action="store_true", help="config and keys as one JSON object on stdout")
    args, overrides = parser.parse(words)
    _refuse_overwriting(args.to, args.force)

    from lockstep.config.importing import import_file

    imported = import_file(args.file, args.kind, args.ranks, overrides, args.lenient)
    if args.json:
        emit(_as_json(imported), indent=2)
    else:
        _tell(imported, sys.stdout if args.to else sys.stderr)
    if imported.unanswered and not args.lenient:
        raise ConfigError(_left(imported.unanswered))
    if args.to:
        args.to.write_text(_text(imported))
    elif not args.json:
        echo(_text(imported), end="")
    return 0


def _refuse_overwriting(to: Path | None, force: bool) -> None:
    if to is None:
        return
    if to.is_dir():
        raise ConfigError(f"{to} is a folder; --to names the file to write, such as {to / 'run.yaml'}")
    if to.exists() and not force:
        raise ConfigError(f"{to} exists; --force overwrites it")
    if not to.parent.is_dir():
        raise ConfigError(f"there is no folder {to.parent} for {to.name}")


def _left(findings: Sequence[Finding]) -> str:
    keys = ", ".join(plain_line(one.key) for one in findings)
    return f"nothing was written: {keys} would be lost; correct the file, or leave that out by --lenient"


# --- the config -----------------------------------------------------------------------------------------------------


def _text(imported: Imported) -> str:
    from lockstep.config.foreign_files import NAMES
    from lockstep.config.importing import nested
    from lockstep.config.writing import plain_yaml

    lines = [f"From {imported.file.path.name} ({NAMES[imported.file.kind]}), by lockstep config import."]
    lines += [f"To be added: {key}: {how}" for key, how in imported.missing.items()]
    lines += [f"To do: {one.key}: {one.answer.why}" for one in imported.findings if one.answer.standing == "to do"]
    # a key with a line break in it must not end the comment: what follows would be a line of the config
    return "".join(f"# {plain_line(line)}\n" for line in lines) + plain_yaml(nested(imported.settings))


# --- the keys -------------------------------------------------------------------------------------------------------


def _tell(imported: Imported, to: TextIO) -> None:
    from lockstep.config.foreign_files import NAMES

    rows = [(one.key, one.answer.standing, _said(one)) for one in imported.findings]
    width = min(45, max(len(key) for key, _, _ in rows))
    echo(f"{imported.file.path}: {NAMES[imported.file.kind]}, {len(imported.file.said)} keys", file=to)
    for key, standing, said in rows:
        echo(plain_line(f"  {key:<{width}}  {standing:<10}  {said}"), file=to)
    for key, how in imported.missing.items():
        echo(f"to be added: {key}: {how}", file=to)
    if imported.missing:
        echo("or lay what is written over a recipe that has these: lockstep train RECIPE FILE", file=to)


def _said(one: Finding) -> str:
    from lockstep.config.wording import yaml_like

    written = ", ".join(f"{key}: {_unquoted(yaml_like(value))}" for key, value in one.answer.settings.items())
    why = one.answer.why
    if not written:
        return why
    return f"{written} ({why})" if why else written


def _unquoted(text: str) -> str:
    return text[1:-1] if text[:1] == text[-1:] == "'" and len(text) > 2 else text


def _as_json(imported: Imported) -> dict[str, object]:
    from lockstep.config.importing import nested

    return {
        "kind": imported.file.kind,
        "config": nested(imported.settings),
        "missing": dict(imported.missing),
        "keys": [
            {
                "key": one.key,
                "where": one.where,
                "standing": one.answer.standing,
                "settings": dict(one.answer.settings),
                "why": one.answer.why,
            }
            for one in imported.findings
        ],
    }
