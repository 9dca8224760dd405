"""Tools that launchers share: running other programs, checks of options, writing a job's files, printing its output."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.jobs import JobCommand, JobStatus
from lockstep.core.secrets import names_a_secret
from lockstep.core.terminal import command_line, echo, plain, shortened

_Answer = TypeVar("_Answer")

_VARIABLE = re.compile(r"[A-Za-z_]\w*(=[^\0]*)?", re.DOTALL)
_LAST_UPDATE_S = 60  # for the update that is running and the ends of the processes
_WRITTEN_PER_SECOND = 200e6  # bytes, by a node, to a slow shared file system
_UNKNOWN_STATE_S = 120
_PATIENCE_S = 300.0  # with a job that can't be asked
_MOST_LINES = 3
_MOST_NAME = 40  # characters: pods of Kubernetes add a suffix of their own, and a label has 63


def seconds_to_save(command: JobCommand, nodes: int) -> int:
    """Return how many seconds the ranks of a run need from a warning until they have saved and stopped."""
    if command.state_bytes is None:
        return _UNKNOWN_STATE_S
    return _LAST_UPDATE_S + round(command.state_bytes / (_WRITTEN_PER_SECOND * nodes))


def execute(words: Sequence[str], remedy: str = "", given: str | None = None, *, patience_s: float = 120.0) -> str:
    """Run a program and return its stdout. Raises RunFailed if it is missing, fails, or doesn't answer in time.

    Args:
        remedy: What to do if the program isn't there, as the end of a sentence.
        given: Its stdin; None: this process's.
    """
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, errors="replace", timeout=patience_s)
    except OSError as error:
        why = "is not installed here" if isinstance(error, FileNotFoundError) else f"can't be started: {error.strerror}"
        raise RunFailed(f"{words[0]} {why}{f'; {remedy}' if remedy else ''}") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{shlex.join(words)} did not answer within {patience_s:g} s") from None
    if done.returncode != 0:
        lines = [line.strip().removeprefix(f"{words[0]}: error: ") for line in done.stderr.splitlines() if line.strip()]
        why = "; ".join(lines[:_MOST_LINES]) or f"exit code {done.returncode}"
        raise RunFailed(f"{words[0]} failed: {why}")
    return done.stdout


def own_program() -> str:
    """Return the words, for a shell, that start this Lockstep at the same path of another machine."""
    script = Path(sys.executable).parent / "lockstep"
    return shlex.quote(str(script)) if script.is_file() else f"{shlex.quote(sys.executable)} -m lockstep"


def job_name(name: str, unique: str) -> str:
    """Return a name for a job and what belongs to it, valid as a host name."""
    plain_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MOST_NAME].strip("-")
    return f"{plain_name if plain_name[:1].isalpha() else f'run-{plain_name}'.strip('-')}-{unique}"


def bash_array(words: Sequence[str]) -> str:
    """Return the words for an array of bash; commas are quoted, too, because they look like a mistake there."""
    return " ".join(f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word) for word in words)


def as_comment(text: str) -> str:
    """Return a text for a comment of a script or of YAML: one line of characters that YAML can have."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def variable_problems(texts: Sequence[str], secret: str, *, from_here: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with the option --env.

    Args:
        secret: The end of a sentence about a variable that looks like a secret.
        from_here: Whether NAME without a value takes its value from here.
    """
    for text in texts:
        name, equals, _ = text.partition("=")
        if not _VARIABLE.fullmatch(text) or not (equals or from_here):
            yield Problem("--env", "", f"{shortened(text)} is not NAME=VALUE, such as NCCL_DEBUG=INFO")
        elif not equals and name not in os.environ:
            yield Problem("--env", "", f"{name} isn't set here; set it, or write {name}=VALUE")
        elif equals and names_a_secret(name):
            yield Problem("--env", "", f"{name} looks like a secret, {secret.format(name=name)}")


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return `KEY=VALUE` texts as a mapping."""
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


class _PlainDumper(yaml.SafeDumper):
    """Writes a mapping again where it comes again."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(data: Mapping[str, Any]) -> str:
    """Return YAML that a person can read."""
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, width=float("inf"))


def program_words(text: str) -> list[str]:
    """Return the words of the option --program. Raises ConfigError: there is none, or a quote isn't closed."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(Problem("--program", "", f"{text!r} is not a command: {error}")) from None
    if not words or not words[0]:
        raise ConfigError(Problem("--program", "", "is empty; leave it out, or give a program"))
    if not text.isprintable():
        raise ConfigError(Problem("--program", "", f"{shortened(text)} is not a command on one line"))
    return words


def read_record(path: Path | None) -> dict[str, Any]:
    """Return the object in a job's file; empty if it is missing or damaged."""
    try:
        return {**json.loads(read_bounded(path, MAX_JSON_BYTES))} if path is not None else {}
    except (OSError, ValueError, TypeError):
        return {}


def write_files(files: Mapping[Path, str]) -> None:
    """Write a job's files. Raises RunFailed."""
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        except OSError as error:
            raise RunFailed(f"can't write {path}: {error.strerror}") from None


_State = TypeVar("_State", bound=JobStatus)


def follow_until_end(
    launcher: str, job: str, ask: Callable[[], _State], print_new: Callable[[_State], object], pause: float
) -> int:
    """Print changes of a job's state, and what is new of its output, until it has ended; return its exit code.

    Both may fail for a while, as when the network is gone.
    """
    shown, way = "", command_line("lockstep", "launch", launcher, "follow", job)
    while True:
        state = _patiently(way, ask, pause)
        if state.text != shown:
            shown = state.text
            echo(shown, file=sys.stderr, flush=True)
        _patiently(way, partial(print_new, state), pause)
        if state.code is not None:
            return state.code
        time.sleep(pause)


def _patiently(way: str, question: Callable[[], _Answer], pause: float) -> _Answer:
    began, noted = time.monotonic(), False
    while True:
        try:
            return question()
        except RunFailed as failure:
            if time.monotonic() - began > _PATIENCE_S:
                raise RunFailed(f"{failure}; the job continues; {way} asks again") from failure
            if not noted:
                text = f"note: {failure}; the job continues; it is asked again for {_PATIENCE_S / 60:g} minutes"
                echo(text, file=sys.stderr, flush=True)
            noted = True
        time.sleep(pause)


def refuse_to_cancel_ended(state: JobStatus) -> None:
    if state.code is not None:
        raise ConfigError(f"there is nothing to cancel: {state.text}")


class OutputTail:
    """Prints what is added to a job's output files, which match a pattern of `glob`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._read: dict[str, int] = {}
        self._last = ""

    def print_new(self) -> None:
        """Print what is new, with the file's name where another file's lines came before."""
        for path in sorted(glob.glob(self._pattern)):
            try:
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
            except OSError:  # a shared folder may be slow to show it
                continue
            whole = new[: new.rfind(b"\n") + 1]  # the rest of a line comes later
            if not whole:
                continue
            self._read[path] = self._read.get(path, 0) + len(whole)
            if len(self._read) > 1 and path != self._last:
                echo(f"--- {Path(path).name}", file=sys.stderr)
            self._last = path
            echo(plain(whole.decode(errors="replace").rstrip("\n")), flush=True)
