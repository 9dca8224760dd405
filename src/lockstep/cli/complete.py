"""Answer one press of Tab: `python -P -m lockstep.cli.complete SHELL [WORD ...]`, called by the shell's script.

    train digits --optim.ki      ->   words                      files: the shell adds names of files
                                      --optim.kind=<Tab>Which optimizer

WORD ... is what follows `lockstep`, up to the cursor; the last is the word to complete. Nothing is evaluated: the words
are compared with a table (`completion_table`), and only words of the table are printed, so that what is inserted needs
no quotes. Only light modules of the standard library are imported.
"""

from __future__ import annotations

import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HELP = {"--help": "show help"}


class Reply:
    """The words that may follow at the cursor, each with a description, and whether a file may."""

    def __init__(self, words: dict[str, str] | None = None, *, files: bool = False) -> None:
        self.words, self.files = words or {}, files


def answer(before: list[str], current: str) -> Reply:
    """Return what `current` may become after the words `before` it."""
    table = _table()
    commands: dict[str, Any] = table["commands"]
    top = {verb: entry["help"] for verb, entry in commands.items()} | _HELP
    if not before:
        return Reply(_beginning(top, current))
    command, rest = commands.get(before[0]), before[1:]
    if command is not None and "commands" in command:
        inner = command["commands"]
        plain = _argument(table, command, rest, current) if "flags" in command else Reply()
        if not rest:
            words = _beginning({way: entry["help"] for way, entry in inner.items()} | _HELP, current)
            return Reply(plain.words | words, files=plain.files)
        if rest[0] not in inner:
            return plain
        command, rest = inner[rest[0]], rest[1:]
        if before[0] == "launch" and command is not None:
            return _launched(table, command, rest, current)
    return Reply() if command is None else _argument(table, command, rest, current)


def _launched(table: dict[str, Any], command: dict[str, Any], before: list[str], current: str) -> Reply:
    """Complete a launcher's flags, then the verb, then the verb's own arguments."""
    flags: dict[str, Any] = command["flags"]
    number = 0
    while number < len(before) and before[number].startswith("-"):
        number += 2 if "takes" in flags.get(before[number], {}) else 1
    verb = before[number] if number < len(before) else None
    if verb in command["verbs"]:
        return answer(before[number:], current)
    if verb is not None:
        return Reply(files=verb in command["of_jobs"])
    words = _argument(table, command, before, current)
    return (
        words
        if number > len(before) or current.startswith("-")
        else Reply(_beginning(dict.fromkeys((*command["verbs"], *command["of_jobs"]), ""), current))
    )


def _argument(table: dict[str, Any], command: dict[str, Any], before: list[str], current: str) -> Reply:
    flags: dict[str, Any] = command["flags"]
    keys: dict[str, Any] = table["keys"] if command["overrides"] else {}
    name, equals, value = current.partition("=")
    if equals:
        entry = flags[name].get("takes") if name in flags else _entry(keys, name.removeprefix("--"))
        return _value(entry, value, f"{name}=") if entry is not None else Reply()
    if before and not current.startswith("-"):
        last = before[-1]
        entry = flags[last].get("takes") if last in flags else None
        if entry is None and last.startswith("--") and last not in flags:
            entry = _entry(keys, last[2:])
        if entry is not None:
            return _value(entry, current)
    if current.startswith("-"):
        free = {flag: entry["help"] for flag, entry in flags.items() if flag not in before}
        return Reply(_beginning(free, current) | _overrides(keys, current, "--"))
    return _positional(table, command, keys, before, current)


def _positional(
    table: dict[str, Any], command: dict[str, Any], keys: dict[str, Any], before: list[str], current: str
) -> Reply:
    overrides = _overrides(keys, current, "") if current else {}
    slots, number = command["positionals"], len(_names(command, before))
    if not slots or (number >= len(slots) and not slots[-1]["repeats"]):
        return Reply(overrides)
    slot = slots[min(number, len(slots) - 1)]
    words = dict.fromkeys(slot["words"], "") | (table["recipes"] if slot["recipes"] else {})
    return Reply(_beginning(words, current) | overrides, files=slot["files"])


def _names(command: dict[str, Any], before: list[str]) -> list[str]:
    """Return the words that are neither flags, nor overrides, nor their values."""
    names, skip = [], False
    for word in before:
        if skip and not word.startswith("--"):
            skip = False
        elif word.startswith("--"):
            known = command["flags"].get(word)
            skip = "=" not in word and (known is None or "takes" in known)
        elif not (command["overrides"] and "=" in word):
            names.append(word)
    return names


def _value(entry: dict[str, Any], current: str, prefix: str = "") -> Reply:
    words = _beginning(dict.fromkeys(entry["words"], ""), current)
    return Reply({prefix + word: text for word, text in words.items()}, files=entry["files"])


def _beginning(words: dict[str, str], start: str) -> dict[str, str]:
    return {word: text for word, text in words.items() if word.startswith(start)}


# --- overrides ------------------------------------------------------------------------------------------------------


def _overrides(keys: dict[str, Any], current: str, dashes: str) -> dict[str, str]:
    """Return keys as far as their next dot: `optim.`, then `optim.lr=`."""
    typed = current.removeprefix(dashes) if len(current) >= len(dashes) else ""
    words: dict[str, str] = {}
    for key, entry in keys.items():
        named = _named(key, typed)
        if named is None or not named.startswith(typed):
            continue
        head, dot, _ = named[len(typed) :].partition(".")
        if "NAME" in (typed + head).split("."):
            continue
        words[f"{dashes}{typed}{head}{dot or '='}"] = "" if dot else entry["help"]
    return words


def _entry(keys: dict[str, Any], typed: str) -> dict[str, Any] | None:
    return next((entry for key, entry in keys.items() if _named(key, f"{typed}=") == typed), None)


def _named(key: str, typed: str) -> str | None:
    """Return the key with the free name that was typed; None if it isn't a plain name."""
    if "NAME" not in key:
        return key
    parts, names = key.split("."), typed.split(".")
    for place, part in enumerate(parts):
        if part == "NAME" and place < len(names) - 1:
            if not _NAME.fullmatch(names[place]):
                return None
            parts[place] = names[place]
    return ".".join(parts)


# --- words from the shell -------------------------------------------------------------------------------------------


def unquoted(word: str) -> str:
    """Return the text of a word of bash's command line without expanding it; its last quote may be open."""
    letters, quote, escaped = [], "", False
    for letter in word:
        if escaped:
            letters.append(letter)
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif letter == quote:
            quote = ""
        elif letter in "'\"" and not quote:
            quote = letter
        else:
            letters.append(letter)
    return "".join(letters)


def _table() -> dict[str, Any]:
    with open(os.path.join(os.path.dirname(__file__), "completion.json"), encoding="utf-8") as file:
        table: dict[str, Any] = json.load(file)
        return table


def main(shell: str, words: list[str]) -> None:
    """Print `files` or `words`, then a line for each word: the word, a tab, its description."""
    plain = [unquoted(word) for word in words] if shell == "bash" else words
    *before, current = plain or [""]
    reply = answer(before, current)
    lines = [f"{word}\t{text}" for word, text in reply.words.items()]
    sys.stdout.write("\n".join(["files" if reply.files else "words", *lines]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
