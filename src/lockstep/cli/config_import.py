"""The command `config import`: convert another tool's config, and list what becomes of each key."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from lockstep.cli.arguments import Parser, path, whole
from lockstep.core.errors import ConfigError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo, plain_line

if TYPE_CHECKING:
    from lockstep.interop.importing import ImportedConfig, ImportedKey

_SUMMARY = (
    "Converts a script's YAML or TOML, a DeepSpeed JSON, HF TrainingArguments or Accelerate's config to a\n"
    "Lockstep config. Each key is listed: taken, derived, to do, or not needed, with the reason. Overrides are added."
)
_EPILOG = """\
If a key is not there or not known, the exit code is 2 and nothing is written; --lenient leaves these keys out.
What no file contains, such as your model and data, is listed at the end; add it by overrides:
  lockstep config import args.json --ranks 8 model.kind=huggingface model.task=causal-lm model.pretrained=gpt2"""


def run(arguments: Sequence[str]) -> int:
    """Convert a file, list its keys, and write the config."""
    parser = Parser("config import", _SUMMARY, _EPILOG, "FILE [flags] [overrides]")
    parser.add_argument("file", type=path, metavar="FILE", help="YAML, JSON or TOML; a pickle is refused")
    kinds = ("yaml", "deepspeed", "trainer", "accelerate")
    parser.add_argument("--from", dest="kind", choices=kinds, help="kind of file; default: inferred from its keys")
    parser.add_argument("--ranks", type=whole, metavar="N", help="ranks on all machines that the file was made for")
    parser.add_argument("--to", type=path, metavar="FILE", help="where to write the config; by default stdout")
    parser.add_argument("--force", action="store_true", help="let --to overwrite a file")
    parser.add_argument("--lenient", action="store_true", help="leave out keys that are not there or not known")
    parser.add_argument("--json", action="store_true", help="print config and keys as one JSON object on stdout")
    args, overrides = parser.parse(arguments)
    if args.to is not None and args.to.exists() and not (args.force and args.to.is_file()):
        raise ConfigError(f"{args.to} exists; --force overwrites a file")
    if args.to is not None and not args.to.parent.is_dir():
        raise ConfigError(f"there is no folder {args.to.parent} for {args.to.name}")

    from lockstep.interop.importing import import_file

    imported = import_file(args.file, args.kind, args.ranks, overrides, args.lenient)
    if args.json:
        emit(_as_json(imported), indent=2)
    else:
        _list_keys(imported, sys.stdout if args.to else sys.stderr)
    if imported.unanswered and not args.lenient:
        keys = ", ".join(plain_line(finding.key) for finding in imported.unanswered)
        raise ConfigError(f"nothing was written, because {keys} would be lost; correct the file, or use --lenient")
    if args.to:
        args.to.write_text(_yaml(imported))
    elif not args.json:
        echo(_yaml(imported), end="")
    return 0


def _yaml(imported: ImportedConfig) -> str:
    from lockstep.config.writing import plain_yaml
    from lockstep.interop.foreign import NAMES
    from lockstep.interop.importing import nested

    to_do = [finding for finding in imported.findings if finding.answer.status == "to do"]
    lines = [f"From {imported.file.path.name} ({NAMES[imported.file.kind]}), by lockstep config import."]
    lines += [f"To be added: {key}: {how}" for key, how in imported.missing.items()]
    lines += [f"To do: {finding.key}: {finding.answer.why}" for finding in to_do]
    # a key with a line break in it must not end the comment: what follows would be a line of the config
    return "".join(f"# {plain_line(line)}\n" for line in lines) + plain_yaml(nested(imported.settings))


def _list_keys(imported: ImportedConfig, to: TextIO) -> None:
    from lockstep.interop.foreign import NAMES

    width = min(45, max(len(finding.key) for finding in imported.findings))
    echo(f"{imported.file.path}: {NAMES[imported.file.kind]}, {len(imported.file.keys)} keys", file=to)
    for finding in imported.findings:
        line = f"  {finding.key:<{width}}  {finding.answer.status:<10}  {_settings_and_reason(finding)}"
        echo(plain_line(line), file=to)
    for key, how in imported.missing.items():
        echo(f"to be added: {key}: {how}", file=to)
    if imported.missing:
        echo("or merge the written file over a recipe that has these: lockstep train RECIPE FILE", file=to)


def _settings_and_reason(finding: ImportedKey) -> str:
    from lockstep.config.wording import yaml_like

    written = ", ".join(f"{key}: {yaml_like(value)}" for key, value in finding.answer.settings.items())
    why = finding.answer.why
    return f"{written} ({why})" if written and why else written or why


def _as_json(imported: ImportedConfig) -> dict[str, object]:
    from lockstep.interop.importing import nested

    keys = []
    for finding in imported.findings:
        answer = {"standing": finding.answer.status, "settings": dict(finding.answer.settings)}
        keys.append({"key": finding.key, "where": finding.where, **answer, "why": finding.answer.why})
    config, missing = nested(imported.settings), dict(imported.missing)
    return {"kind": imported.file.kind, "config": config, "missing": missing, "keys": keys}
