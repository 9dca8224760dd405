"""The options of Slurm that the script depends on; sbatch itself checks the others when a job is submitted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from lockstep.core.errors import Problem
from lockstep.core.terminal import shortened

_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,6})(?::(?P<minutes>[0-9]{1,6})(?::(?P<seconds>[0-9]{1,6}))?)?"
    r"|(?P<rest>[0-9]{1,9}(?::[0-9]{1,9}){0,2}))"
)
_NO_LIMIT = ("0", "INFINITE", "UNLIMITED")
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
_SHORT = {"-a": "array", "-c": "cpus-per-task", "-N": "nodes", "-n": "ntasks", "-t": "time"}
_BASH_S = 10


def passed_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield which further options of sbatch the script sets itself."""
    for word in words:
        name = word[2:].partition("=")[0] if word.startswith("--") else _SHORT.get(word[:2], "")
        if name in _OWN:
            yield Problem("--sbatch", "", f"{shortened(word)} would contradict the script; {_OWN[name]} instead")


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
