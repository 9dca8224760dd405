"""The verb `init`: lockstep init [KIND]."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.arguments import Parser, path
from lockstep.config.init_templates import CONFIG, STARTS, InitTemplate
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError
from lockstep.core.terminal import command_line, echo


def run(arguments: Sequence[str]) -> int:
    """Write a config with comments, or other first files; on a terminal ask for what isn't given."""
    kinds = "\n".join(f"  {name:<11} {start.summary}" for name, start in STARTS.items())
    parser = Parser("init", "Writes a first config, with comments.", f"KIND is one of\n{kinds}")
    parser.add_argument("kind", nargs="?", metavar="KIND", help="what to write; on a terminal it is asked for")
    parser.add_argument("--folder", type=path, default=Path(), metavar="FOLDER", help="default: the current folder")
    parser.add_argument("--model", metavar="NAME", help="finetune, classifier: a folder or a name on the hub")
    parser.add_argument("--data", metavar="NAME", help="text, finetune, classifier: a file, folder or name on the hub")
    args = parser.parse_args(arguments)
    asks = args.kind is None and sys.stdin.isatty() and sys.stdout.isatty()
    kind = _ask_kind() if asks else args.kind
    start = _start(kind)
    for flag, named, known in (("--model", args.model, start.model), ("--data", args.data, start.data)):
        if named is not None and known is None:
            raise ConfigError(f"init {kind} has no {flag}; edit {CONFIG} once it is written")
    model = _ask("Model, a folder or a name on the hub", start.model) if asks and not args.model else args.model
    data = _ask("Data, a file, a folder or a name", start.data) if asks and not args.data else args.data
    columns = _columns(data, start)
    model, data = _relative_to(args.folder, model), _relative_to(args.folder, data)
    config = {CONFIG: start.filled_config(model, data, columns)} if start.template else {}
    _write(args.folder, {**config, **start.files})
    enter = [] if args.folder == Path() else [command_line("cd", args.folder)]
    then = [f"lockstep config check {CONFIG}", f"lockstep train {CONFIG}"] if start.template else []
    echo("\nnext:")
    for line in (*enter, *start.filled_commands(data), *then):
        echo(f"  {line}")
    return 0


def _columns(data: str | None, start: InitTemplate) -> dict[str, str]:
    """Return the columns of the data for text and label, as far as only one can be meant; the check names others.

    Raises:
        ConfigError: The data is a pattern of files, or a chat for a classifier.
    """
    from lockstep.data.columns import check_first_texts, first_row, is_chat

    if data and not Path(data).expanduser().exists() and any(sign in data for sign in "*?["):
        raise ConfigError(f"--data {data} is a pattern, and Lockstep reads one file or folder; give the files' folder")
    row = first_row(data) if data and start.model is not None else {}
    texts = [name for name, value in row.items() if isinstance(value, str)]
    numbers = [name for name, value in row.items() if type(value) is int]
    chats = [name for name, value in row.items() if is_chat(value) and name != "tools"]
    is_finetune, prompt = start is STARTS["finetune"], row.keys() >= {"prompt", "completion"}
    if chats and "text" not in row and not is_finetune:
        check_first_texts(row, chats)
    more = {"tools": "tools"} if "tools" in row else {}
    if is_finetune and row.keys() >= {"chosen", "rejected"}:
        paired = _prompt_of_pairs(row)
        return {**paired, "rejected": "rejected", **(more if "messages" in paired else {})}
    is_rated = isinstance(row.get("label"), bool) or (prompt and row.get("label") in (0, 1))
    rated = {"desirable": "label"} if is_rated else {}
    if is_finetune and prompt and not chats:
        return {"text": "prompt", "label": "completion", **rated}
    if is_finetune and chats and "text" not in row:
        answers = {"label": "completion"} if prompt else {}
        named = (name for name in ("prompt" if prompt else "", "messages", "conversations", *chats) if name in chats)
        return {"messages": next(named), **answers, **more, **rated}
    columns = {"text": ("text", texts), "label": ("label", [] if is_finetune else numbers)}
    return {key: names[0] for key, (usual, names) in columns.items() if usual not in row and len(names) == 1}


def _prompt_of_pairs(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of the prompt and of the chosen answer; two whole conversations have the prompt in them."""
    chosen = row["chosen"]
    if isinstance(chosen, str):
        return {"text": "prompt", "label": "chosen"}
    begins = chosen[0].get("role", chosen[0].get("from")) if chosen and isinstance(chosen[0], Mapping) else ""
    if "prompt" in row and begins in ("assistant", "gpt"):
        return {"messages": "prompt", "label": "chosen"}
    return {"messages": "chosen"}


def _relative_to(folder: Path, name: str | None) -> str | None:
    """Return a file or folder relative to the folder where training starts; a name on the hub stays."""
    if not name or not Path(name).expanduser().exists():
        return name
    named = Path(name).expanduser()
    return str(named) if named.is_absolute() else os.path.relpath(named.absolute(), folder.resolve())


def _start(kind: str | None) -> InitTemplate:
    if kind is None:
        raise ConfigError(f"init needs a kind: lockstep init {'|'.join(STARTS)}")
    if kind in STARTS:
        return STARTS[kind]
    raise ConfigError(f"init has no kind {kind!r}; {did_you_mean(kind, STARTS)}")


def _ask_kind() -> str:
    for number, (name, start) in enumerate(STARTS.items(), 1):
        echo(f"  {number}  {name:<11} {start.summary}")
    answer = _ask("What to train", "1") or ""
    names = list(STARTS)
    return names[int(answer) - 1] if answer.isdecimal() and 1 <= int(answer) <= len(names) else answer


def _ask(question: str, usual: str | None) -> str | None:
    if usual is None:
        return None
    try:
        return input(f"{question} [{usual}]: ").strip() or usual
    except EOFError:
        return usual


def _write(folder: Path, texts: dict[str, str]) -> None:
    there = [str(folder / name) for name in texts if (folder / name).exists()]
    if there:
        named = f"{' and '.join(there)} {'exist' if len(there) > 1 else 'exists'}"
        raise ConfigError(f"{named} already, and nothing was overwritten; use another --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with open(folder / name, "x", encoding="utf-8") as file:
            file.write(text)
        echo(f"wrote {folder / name}")
