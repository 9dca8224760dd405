"""Runs a command on hosts that ssh reaches, as long as this command runs.

--hosts a,b:8,me@c          a and c as many ranks as the command states, b 8
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem, RunFailed, refuse
from lockstep.core.jobs import HostOptions, JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.nodes import checked_address
from lockstep.core.processes import started
from lockstep.launch.rendezvous import TOKEN
from lockstep.launchers.ssh_run import SshHost, SshRun, rendezvous_of
from lockstep.launchers.tools import own_program, read_record, refuse_to_cancel_ended, variable_problems, write_files
from lockstep.strategies.section import Section

_RECORD = "ssh.json"
_TO_BE_CHOSEN = "ADDRESS:PORT"  # of the first host, once it has answered
_OPTIONS = (
    *("-T", "-x", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10"),
    *("-oServerAliveInterval=5", "-oServerAliveCountMax=6", "-oControlMaster=no", "-oControlPath=none"),
)
"""Options so that ssh never asks, notices a lost connection, and shares none with other processes."""
_NAME = r"[^\s:\[\],-][^\s:\[\],]*"
_HOST = re.compile(rf"(?P<name>{_NAME}|({_NAME}@)?\[[^\s\],-][^\s\],]*\])(?::(?P<ranks>[1-9]\d*))?")
_SECRET = "which a file would show; set it, and give --env {name}"


class SshOptions(Section, HostOptions):
    """Options of a run on hosts that ssh reaches."""

    hosts: str | None = None
    """Hosts, as ssh knows them, separated by commas; the first is node 0. NAME:N gives a host N ranks."""
    folder: str | None = None
    """Working folder on the hosts; by default the path of this one."""
    program: str | None = None
    """Command that starts Lockstep on the hosts, for their shells; by default this one's path."""
    env: tuple[str, ...] = ()
    """An environment variable for the run: NAME=VALUE, or NAME with its value here; may be repeated."""
    rendezvous: str | None = None
    """HOST:PORT, an address of the first host that the others reach; by default one that it says it has."""
    grace: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a host has to save when the connection to it is lost; then its processes are killed."""
    ssh: tuple[str, ...] = ()
    """A further option of ssh, passed on as it is, such as --ssh=-p2222 or --ssh=-oUser=me; may be repeated."""

    def world_size(self, ranks: int | None) -> int | None:
        """Return the number of ranks on all hosts."""
        numbers = [own or ranks or 0 for own in hosts_of(self).values()]
        return sum(numbers) if all(numbers) else None


def hosts_of(options: SshOptions) -> dict[str, int | None]:
    """Return the hosts in their order, with the number of ranks if it is given. Raises ConfigError."""
    if options.hosts is None:
        raise ConfigError("--hosts a,b with the hosts is missing; --hosts $(paste -sd, FILE) reads them")
    hosts: dict[str, int | None] = {}
    for text in map(str.strip, options.hosts.split(",")):
        match = _HOST.fullmatch(text)
        if match is None:
            forms = "NAME, NAME:8 for 8 ranks, or [::1]:8 for an address of IPv6"
            raise ConfigError(Problem("--hosts", "", f"{text!r} is not a host; write {forms}"))
        name = re.sub(r"[\[\]]", "", match["name"])
        if name in hosts:
            raise ConfigError(f"host {name} is given twice; give it once, with the number of its ranks: {name}:8")
        hosts[name] = int(match["ranks"]) if match["ranks"] else None
    return hosts


def _check(command: JobCommand, options: SshOptions, hosts: Mapping[str, int | None]) -> None:
    problems = [*variable_problems(options.env, _SECRET, from_here=True)]
    if not command.nodes and (len(hosts) > 1 or any(hosts.values())):
        message = f"`lockstep {command.words[0]}` runs on one host; give one, without :N"
        problems.append(Problem("--hosts", "", message))
    if options.rendezvous is not None:
        try:
            checked_address(options.rendezvous)
        except ValueError as error:
            problems.append(Problem("--rendezvous", "", str(error)))
    wrong = [word for word in options.ssh if not re.fullmatch(r"-[A-Za-z0-9].*", word)]
    problems += [Problem("--ssh", "", f"{word!r} is not an option of it; write --ssh=-p2222") for word in wrong]
    refuse(problems)


class SshLauncher:
    """The launcher `ssh`."""

    options = SshOptions

    def __init__(self) -> None:
        self._runs: dict[str, tuple[SshRun, Path]] = {}

    def plan(self, command: JobCommand, options: SshOptions) -> LaunchPlan:
        """Return the process to start on each host."""
        hosts = hosts_of(options)
        _check(command, options, hosts)
        program = options.program or own_program()
        job = secrets.token_hex(4)
        named = enumerate(hosts.items())
        lines = {name: shlex.join(_words(command, own, node, len(hosts), job)) for node, (name, own) in named}
        record = {
            **options.model_dump(include={"rendezvous", "grace"}),
            "job": job,
            "hosts": lines,
            "environment": list(options.env),
        }
        there = f"{program} launch at-host {shlex.quote(options.folder or str(Path.cwd()))}"
        calls = tuple(("ssh", *options.ssh, *_OPTIONS, "--", name, there) for name in hosts)
        return LaunchPlan({command.folder / _RECORD: json.dumps(record, indent=2) + "\n"}, calls, attached=True)

    def submit(self, plan: LaunchPlan) -> str:
        """Start the command on each host once all have answered; return the job's identifier."""
        ((path, text),) = plan.files.items()
        record = json.loads(text)
        hosts: list[SshHost] = []
        try:
            for name, words in zip(record["hosts"], plan.commands, strict=True):
                log = path.with_name(re.sub(r"[^\w.@-]", "_", name) + ".log") if hosts else None
                hosts.append(SshHost(name, words, log))
            own_address = rendezvous_of(hosts)
            rendezvous = record["rendezvous"] or own_address
            for name, line in record["hosts"].items():
                record["hosts"][name] = line.replace(_TO_BE_CHOSEN, rendezvous)
            own = {"machine": socket.gethostname(), "process": os.getpid(), "started": started(os.getpid())}
            write_files({path: json.dumps({**record, **own, "code": None}, indent=2) + "\n"})
        except BaseException:
            for host in hosts:
                host.hang_up()
                host.process.wait()
            raise
        parts = [text.partition("=") for text in record["environment"]]
        given = {name: value if equals else os.environ[name] for name, equals, value in parts}
        order = {"environment": {**given, TOKEN: secrets.token_hex(32)}, "grace": record["grace"]}
        for host in hosts:
            host.send(json.dumps({**order, "words": shlex.split(record["hosts"][host.name])}))
        self._runs[record["job"]] = SshRun(hosts, record["grace"]), path
        return str(record["job"])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return whether the command that has launched the job runs, or its exit code."""
        record = _record(job)
        name = f"ssh job {record['job']} on {', '.join(record['hosts'])}"
        if record["code"] is not None:
            return JobStatus(f"{name}: ended with exit code {record['code']}", record["code"])
        if record["machine"] != socket.gethostname():
            raise ConfigError(f"this job was launched on {record['machine']}; call this there")
        if started(record["process"]) != record["started"]:
            return JobStatus(f"{name}: its launcher was killed, and the hosts have stopped", 1)
        return JobStatus(f"{name}: runs, launched by process {record['process']}")

    def follow(self, job: LaunchedJob) -> int:
        """Print the output of node 0 until all hosts have ended."""
        if job.number not in self._runs:
            text = self.status(job).text
            raise ConfigError(f"{text}; a job of ssh is followed by the command that launches it, and by no other")
        run, path = self._runs[job.number]
        code = run.follow()
        with suppress(OSError, RunFailed):
            write_files({path: json.dumps({**json.loads(path.read_text()), "code": code}, indent=2) + "\n"})
        return code

    def cancel(self, job: LaunchedJob) -> None:
        """Stop the job as Ctrl-C at its terminal does: saved."""
        refuse_to_cancel_ended(self.status(job))
        os.kill(_record(job)["process"], signal.SIGINT)


SSH = SshLauncher()


def _words(command: JobCommand, ranks: int | None, node: int, nodes: int, job: str) -> list[str]:
    words = [*command.words]
    if ranks is not None:
        words += ["--ranks", str(ranks)]
    if nodes > 1:
        words += ["--nodes", str(nodes), "--rendezvous", _TO_BE_CHOSEN, "--node-rank", str(node), "--job-id", job]
    return words


def _record(job: LaunchedJob) -> Mapping[str, Any]:
    record = read_record(None if job.folder is None else job.folder / _RECORD)
    if not record:
        raise ConfigError(f"{job.number!r} is neither a job that ssh was given from here nor the folder of its run")
    return record
