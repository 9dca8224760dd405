"""Checks of what Python code passes to `lockstep.submit` and `lockstep.find_job`, as texts of a command line.

command_words   ["train", Path("a.yaml"), 2]        -->   train a.yaml 2
sweep_texts     {"optim.lr": [0.1, 0.01]}           -->   optim.lr=0.1,0.01
option_values   {"time": 30, "module": ["cuda"]}    -->   what the flags --time=30 --module=cuda would give

Each mistake is a ConfigError with the name of the argument, the value and a valid one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real

from pydantic import BaseModel

from lockstep.config import shape
from lockstep.config.shape import ValueShape
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.terminal import shortened

_COMMAND = 'write ["train", "digits"]'
_SWEEP = '{"optim.lr": [0.1, 0.01]}'


def command_words(command: object) -> list[str]:
    """Return the words of a command. Raises ConfigError."""
    if not isinstance(command, Sequence) or isinstance(command, str | bytes | bytearray) or not command:
        raise ConfigError(Problem("", "command", f"{shortened(command)} is not a list of words; {_COMMAND}"))
    words = [_text(word) for word in command]
    wrong = [shortened(word) for word, text in zip(command, words, strict=True) if text is None]
    if wrong:
        message = f"{', '.join(wrong)}: a word is a text, a number or a path; {_COMMAND}"
        raise ConfigError(Problem("", "command", message))
    return [word for word in words if word is not None]


def sweep_texts(sweep: object) -> list[str]:
    """Return KEY=A,B for each key. Raises ConfigError."""
    if sweep is None:
        return []
    if not isinstance(sweep, Mapping):
        message = f"{shortened(sweep)} is not a mapping of keys to lists of values; write {_SWEEP}"
        raise ConfigError(Problem("", "sweep", message))
    return [_sweep_text(key, values) for key, values in sweep.items()]


def _sweep_text(key: object, values: object) -> str:
    if not isinstance(key, str) or not key or "=" in key:
        raise ConfigError(Problem("", "sweep", f"{shortened(key)} is not a key of the config; write {_SWEEP}"))
    listed = [] if isinstance(values, str | bytes | bytearray | Mapping | Set) else values
    texts = ["null" if each is None else _text(each) for each in (listed if isinstance(listed, Iterable) else ())]
    plain = [text for text in texts if text and "," not in text]
    if not texts or len(plain) < len(texts):
        message = f"{shortened(values)} is not a list of values without commas; write [0.1, 0.01]"
        raise ConfigError(Problem("", key, message))
    return f"{key}={','.join(plain)}"


def option_values(where: str, section: type[BaseModel], options: Mapping[str, object]) -> dict[str, object]:
    """Return the options as the section has them, without those that are None. Raises ConfigError.

    Args:
        where: The launcher's name.
    """
    known = section.model_fields
    text = "there is no such option of {}; {}"
    problems = [Problem("", name, text.format(where, did_you_mean(name, known))) for name in options.keys() - known]
    values: dict[str, object] = {}
    for name, value in options.items():
        if name not in known or (value is None and known[name].default is None):
            continue
        at = shape.fields(section)[name]
        is_list = at.items is not None and at.items.text
        values[name] = _listed(value) if is_list else _as_text(value, at)
        if is_list and values[name] is None:
            example = f"[{value!r}]" if isinstance(value, str) else '["...", "..."]'
            problems.append(Problem("", name, f"{shortened(value)} is not a list of texts; write {example}"))
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: [*options].index(problem.key)))
    return values


def job_text(job: object) -> str:
    """Return a job's identifier, or the folder of its run, as text. Raises ConfigError."""
    text = None if isinstance(job, bool) else _text(job)
    if not text:
        message = f"{shortened(job)} is neither the identifier of a job nor the folder of its run"
        raise ConfigError(Problem("", "job", message))
    return text


def _listed(value: object) -> tuple[str, ...] | None:
    """Return texts; None if the value isn't a list of them."""
    if not isinstance(value, list | tuple):
        return None
    texts = [None if isinstance(each, bool) else _text(each) for each in value]
    return None if None in texts else tuple(text for text in texts if text is not None)


def _as_text(value: object, at: ValueShape) -> object:
    """Return a number or a path as text, where only text is valid; any other value as it is."""
    if not at.text or at.boolean or isinstance(value, bool):
        return value
    if isinstance(value, Real) and (at.whole or at.real):
        return value
    text = _text(value)
    return value if text is None else text


def _text(value: object) -> str | None:
    """Return a text, a number, true or false, or a path as a word of a command line; None if it is something else."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value) if isinstance(value, Real) else os.fspath(value) if isinstance(value, os.PathLike) else value
    return text if isinstance(text, str) and "\0" not in text else None
