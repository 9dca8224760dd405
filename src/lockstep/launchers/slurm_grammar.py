"""The grammar of options of Slurm, after the manual of sbatch.

gpus      8  h100:8  h100:4,a100:4              time     30  4:00:00  2-12:00:00  0 and UNLIMITED: no limit
memory    200G  0: all of a node                names    gpu  gpu,debug
features  a100&nvlink  [rack1|rack2]  gpu*2&(a|b)
jobs      afterok:20:21,afterany:23             lines of bash: those that `bash -n` can read
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from lockstep.core.errors import Problem
from lockstep.core.terminal import shortened

_WORD = r"[^\s\x00-\x1f\x7f'\"\\$`;&|<>(){}\[\]*,:=%?]+"
_NAME = re.compile(rf"(?!-){_WORD}")
_NAMES = re.compile(rf"(?!-){_WORD}(,{_WORD})*")
_GPUS = re.compile(rf"(?P<plain>[0-9]{{1,5}})|{_WORD}:[0-9]{{1,5}}(,{_WORD}:[0-9]{{1,5}})*")
_MEMORY = re.compile(r"[0-9]{1,12}([KMGT]B?)?", re.IGNORECASE)
_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,6})(?::(?P<minutes>[0-9]{1,6})(?::(?P<seconds>[0-9]{1,6}))?)?"
    r"|(?P<rest>[0-9]{1,9}(?::[0-9]{1,9}){0,2}))"
)
_NO_LIMIT = ("0", "INFINITE", "UNLIMITED")
_TOKENS = re.compile(rf"{_WORD}|[&|()\[\]]|\*[0-9]+")
_JOB = r"[0-9]+(_([0-9]+|\*))?(\+[0-9]+)?"
_DEPENDENCY = re.compile(
    rf"(after(any|burstbuffer|corr|notok|ok)?:{_JOB}(:{_JOB})*|{_JOB}(:{_JOB})*|singleton)", re.IGNORECASE
)
_OWN = {
    "array": "--sweep KEY=A,B trains several runs",
    "cpus-per-task": "give --cpus-per-task",
    "gpus-per-node": "give --gpus-per-node",
    "nodes": "give --nodes",
    "ntasks": "the ranks are --ranks of the command",
    "ntasks-per-node": "the ranks are --ranks of the command",
    "signal": "give --signal-before",
    "time": "give --time",
}
"""Options of sbatch that Lockstep's script relies on -> what to write instead."""
_SHORT = {
    "-a": "array",
    "-c": "cpus-per-task",
    "-C": "constraint",
    "-d": "dependency",
    "-N": "nodes",
    "-n": "ntasks",
} | {"-t": "time"}
_BASH_S = 10


def option_problems(values: Mapping[str, str | None]) -> Iterator[Problem]:
    """Yield what is wrong with options of the launcher.

    Args:
        values: Name of an option -> its value; None: it isn't given.
    """
    for name, value in values.items():
        if value is not None and (valid := _expected(name, value)):
            yield Problem(f"--{name}", "", f"{shortened(value)} is not {valid}")


def passed_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with further options of sbatch."""
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            name, equals, value = _SHORT.get(word[:2], ""), "=", word[2:].strip()
        if name in _OWN:
            yield Problem("--sbatch", "", f"{shortened(word)} would contradict the script; {_OWN[name]} instead")
        elif equals and (valid := _expected(name, value)):
            yield Problem("--sbatch", "", f"{shortened(word)}: {shortened(value)} is not {valid}")


def _expected(name: str, value: str) -> str:
    """Return what the value of an option should be, as the end of a sentence; empty if it is, or can't be checked."""
    valid = ""
    match name:
        case "partition":
            valid = "" if _NAMES.fullmatch(value) else "the name of a partition, such as gpu; `sinfo -s` lists them"
        case "account" | "qos":
            kind = "an account" if name == "account" else "a quality of service"
            valid = "" if _NAME.fullmatch(value) else f"the name of {kind}, a word without spaces and signs"
        case "constraint":
            valid = "" if _are_features(value) else "a list of features; write a100&nvlink, a100|h100 or [rack1|rack2]"
        case "time":
            valid = "" if is_time(value) else "a time of Slurm; write 30, 4:00:00 or 2-12:00:00"
        case "gpus-per-node":
            valid = "" if _GPUS.fullmatch(value) else f"a number of GPUs; write {_nearest_gpus(value)}"
        case "mem":
            valid = "" if _MEMORY.fullmatch(value) else f"a size; write {_nearest_memory(value)}"
        case "dependency":
            valid = "" if _are_jobs(value) else "a dependency; write afterok:123, or afterok:123:124,afterany:125"
    return valid


def is_time(value: str) -> bool:
    """Return whether Slurm takes the text for a time limit."""
    return value.upper() in _NO_LIMIT or _TIME.fullmatch(value) is not None


def limit_seconds(time: str | None) -> int | None:
    """Return the seconds of a time limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None if it isn't one."""
    match = _TIME.fullmatch(time or "")
    if match is None or time in _NO_LIMIT:
        return None
    if match["rest"] is None:
        days, hours, minutes, seconds = (int(match[unit] or 0) for unit in ("days", "hours", "minutes", "seconds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    numbers = [int(part) for part in match["rest"].split(":")]
    if len(numbers) == 1:
        return 60 * numbers[0]
    return sum(number * factor for number, factor in zip(reversed(numbers), (1, 60, 3600), strict=False))


def _nearest_gpus(value: str) -> str:
    kind = _NAME.fullmatch(value.rstrip(":"))
    return "8 or h100:8" if kind is None or value[:1].isdigit() else f"{kind[0]}:8, the kind with the number"


def _nearest_memory(value: str) -> str:
    match = re.fullmatch(r"([0-9]+)(?:\.[0-9]+)?\s*([KMGT])i?B?", value, re.IGNORECASE)
    return f"{match[1]}{match[2].upper()}" if match else "200G, or 0 for all of a node"


def _are_features(text: str) -> bool:
    """Return whether the text is features of nodes, joined by & and |, with counts and brackets."""
    tokens = _TOKENS.findall(text)
    if "".join(tokens) != text:
        return False
    opened, is_ready = "", False  # is_ready: a feature or a bracket has ended
    for token in tokens:
        if token in "([":
            if is_ready or (token == "[" and "[" in opened):
                return False
            opened += token
        elif token in ")]":
            if not is_ready or opened[-1:] != {")": "(", "]": "["}[token]:
                return False
            opened = opened[:-1]
        elif token in "&|" or token.startswith("*"):
            if not is_ready:
                return False
            is_ready = token.startswith("*")
        elif is_ready:
            return False
        else:
            is_ready = True
    return is_ready and not opened


def _are_jobs(text: str) -> bool:
    separators = {sign for sign in text if sign in ",?"}
    parts = re.split("[,?]", text)
    return len(separators) < 2 and all(_DEPENDENCY.fullmatch(part) for part in parts)


def bash_problems(lines: Sequence[str]) -> Iterator[Problem]:
    """Yield why bash can't read the lines of --setup."""
    if not lines:
        return
    why = _bash_error("\n".join(lines))
    if why:
        yield Problem("--setup", "", f"bash can't read {shortened(' / '.join(lines))}: {why}")


def _bash_error(script: str) -> str:
    """Return why a script can't be read; empty if it can, or if there is no bash to report it."""
    if "\0" in script:
        return "it has a null byte"
    bash = shutil.which("bash")
    if bash is not None:
        done = subprocess.run(
            (bash, "--norc", "-n"), input=os.fsencode(script + "\n"), capture_output=True, timeout=_BASH_S, check=False
        )
        message = (done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}").splitlines()[0]
        return re.sub(r"^.*?bash: ", "", message) if done.returncode else ""
    try:
        shlex.split(script, comments=True)
    except ValueError as error:
        return str(error).lower()
    return ""
