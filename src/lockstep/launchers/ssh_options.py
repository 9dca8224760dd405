"""The options of `lockstep launch ssh`, and the hosts that they name.

--hosts a,b:8,me@c          a and c as many ranks as the command states, b 8
--hostfile hosts.txt        the same, one host on a line: `b`, `b:8` or `b slots=8`; # begins a comment
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import HostOptions, JobCommand, SweepOptions
from lockstep.core.nodes import checked_address
from lockstep.strategies.section import Section

_NAME = r"[^\s:\[\],-][^\s:\[\],]*"
_HOST = re.compile(rf"(?P<name>{_NAME}|({_NAME}@)?\[[^\s\],-][^\s\],]*\])(?::(?P<ranks>[1-9]\d*))?")
_SLOTS = re.compile(r"\s+(?:slots=)(?=\d)")


class SshOptions(Section, HostOptions, SweepOptions):
    """Options of a run on hosts that ssh reaches."""

    hosts: str | None = None
    """Hosts, as ssh knows them, separated by commas; the first is node 0. NAME:N states the ranks of a host."""
    hostfile: str | None = None
    """File with a host on each line, instead of --hosts: NAME, NAME:N or NAME slots=N."""
    folder: str | None = None
    """Working folder on the hosts; by default the path of this one."""
    program: str | None = None
    """Command that starts Lockstep on the hosts; by default this one's path."""
    env: tuple[str, ...] = ()
    """An environment variable for the run: NAME=VALUE, or NAME with its value here; may be repeated."""
    rendezvous: str | None = None
    """HOST:PORT, an address of the first host at which the others reach it; by default one is tried out."""
    grace: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a host has to save when the connection to it is lost; then its processes are killed."""
    ssh: tuple[str, ...] = ()
    """A further option of ssh, passed on as it is, such as --ssh=-p2222 or --ssh=-oUser=me; may be repeated."""

    def world_size(self, ranks: int | None) -> int | None:
        """Return the number of ranks on all hosts."""
        numbers = [host.ranks or ranks for host in hosts_of(self)]
        return None if None in numbers else sum(number for number in numbers if number is not None)


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host, and the number of its ranks if the options state it."""

    name: str
    ranks: int | None

    @property
    def file_name(self) -> str:
        """Return its name as that of a file."""
        return re.sub(r"[^\w.@-]", "_", self.name)


def hosts_of(options: SshOptions) -> list[SshHost]:
    """Return the hosts in their order. Raises ConfigError."""
    if (options.hosts is None) == (options.hostfile is None):
        which = "both are given" if options.hosts is not None else "none is given"
        raise ConfigError(f"--hosts a,b or --hostfile FILE names the hosts, and {which}; give one of them")
    texts = list(_texts(options))
    hosts = []
    for where, text in texts:
        match = _HOST.fullmatch(text)
        if match is None:
            forms = "NAME, NAME:8 for 8 ranks, or [::1]:8 for an address of IPv6"
            raise ConfigError(Problem(where, "", f"{text!r} is not a host; write {forms}"))
        hosts.append(SshHost(re.sub(r"[\[\]]", "", match["name"]), int(match["ranks"]) if match["ranks"] else None))
    if not hosts:
        raise ConfigError(Problem(options.hostfile or "--hosts", "", "no host is named"))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"host {name} is named twice; name it once, with the number of its ranks: {name}:8")
    return hosts


def _texts(options: SshOptions) -> Iterator[tuple[str, str]]:
    """Yield where each host is named, and its text."""
    if options.hosts is not None:
        yield from (("--hosts", text.strip()) for text in options.hosts.split(","))
        return
    path = Path(options.hostfile or "")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(Problem("--hostfile", "", f"{path} can't be read: {why}")) from None
    for number, line in enumerate(lines, 1):
        text = _SLOTS.sub(":", line.partition("#")[0].strip())
        if text:
            yield f"{path}:{number}", text


def check(command: JobCommand, options: SshOptions, hosts: list[SshHost]) -> None:
    """Raise ConfigError if the options don't fit together or with the command."""
    problems = []
    if len(hosts) > 1 and not command.nodes:
        message = f"{len(hosts)} hosts, but `lockstep {command.words[0]}` runs on one; name one"
        problems.append(Problem("--hosts", "", message))
    if not command.nodes and any(host.ranks for host in hosts):
        problems.append(Problem("--hosts", "", f"`lockstep {command.words[0]}` takes no number of ranks from its host"))
    if command.sweep:
        problems.append(Problem("--sweep", "", "needs a queue, which ssh has not; launch the runs one after the other"))
    if options.rendezvous is not None:
        try:
            checked_address(options.rendezvous)
        except ValueError as error:
            problems.append(Problem("--rendezvous", "", str(error)))
    for flag, words, pattern, example in (
        ("--ssh", options.ssh, r"-[A-Za-z0-9][^\n]*", "--ssh=-p2222"),
        ("--env", options.env, r"[A-Za-z_]\w*(=[^\0]*)?", "--env NAME=VALUE"),
    ):
        problems += [
            Problem(flag, "", f"{word!r} is not an option of it; write {example}")
            for word in words
            if not re.fullmatch(pattern, word, re.DOTALL)
        ]
    if problems:
        raise ConfigError(problems)
