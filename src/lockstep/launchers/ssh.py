"""Runs a command on hosts that ssh reaches, as long as this command runs.

plan      what is started on each host, as ssh.json, and the command lines of ssh
submit    connects, checks all hosts side by side, starts the command on each
follow    the output of node 0, and its exit code
status    whether the process of `lockstep launch ssh` runs      cancel    SIGINT to it: saved and stopped
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.processes import started
from lockstep.core.secrets import names_a_secret
from lockstep.launch.meeting import TOKEN
from lockstep.launchers.host_checks import Wanted, check_hosts, shared_folders
from lockstep.launchers.host_connection import HostConnection
from lockstep.launchers.host_run import RemoteRun
from lockstep.launchers.ssh_connection import SshProcess, ssh_words
from lockstep.launchers.ssh_options import SshHost, SshOptions, check, hosts_of
from lockstep.launchers.tools import own_program, program_words, write_files

_RECORD = "ssh.json"
_TO_BE_CHOSEN = "ADDRESS:PORT"  # of the first host, once the hosts have been asked


class SshLauncher:
    """The launcher `ssh`."""

    options = SshOptions

    def __init__(self) -> None:
        self._runs: dict[str, tuple[RemoteRun, Path]] = {}

    def plan(self, command: JobCommand, options: SshOptions) -> LaunchPlan:
        """Return what is started on each host."""
        hosts = hosts_of(options)
        check(command, options, hosts)
        _environment(options.env)
        here = Path.cwd()
        folder = options.folder or str(here)
        program = own_program() if options.program is None else _program(options.program)
        job = secrets.token_hex(4)

        def on_each(words: Sequence[str]) -> dict[str, str]:
            return {
                host.name: shlex.join(_words(words, host, node, len(hosts), job)) for node, host in enumerate(hosts)
            }

        record = {
            "job": job,
            "hosts": on_each(command.words),
            "restarts": on_each(command.restart_words),
            "logs": {host.name: f"{host.file_name}.log" for host in hosts[1:]},
            "folder": folder,
            "shared": shared_folders(command, here, folder),
            "program": program,
            "environment": list(options.env),
            "rendezvous": options.rendezvous,
            "grace": options.grace,
        }
        lines = tuple(ssh_words(host.name, options.ssh, program) for host in hosts)
        return LaunchPlan({command.folder / _RECORD: json.dumps(record, indent=2) + "\n"}, lines, attached=True)

    def submit(self, plan: LaunchPlan) -> str:
        """Check all hosts, and start the command on each; return the job's identifier."""
        ((path, text),) = plan.files.items()
        record = json.loads(text)
        connections = _connect(record, plan.commands)
        try:
            wanted = Wanted(record["folder"], tuple(record["shared"]), record["rendezvous"])
            rendezvous = check_hosts(connections, wanted)
            environment = {**_environment(record["environment"]), TOKEN: secrets.token_hex(32)}
            for part in ("hosts", "restarts"):
                record[part] = {
                    host: line.replace(_TO_BE_CHOSEN, rendezvous or "") for host, line in record[part].items()
                }
            write_files({path: json.dumps({**record, **_this_process()}, indent=2) + "\n"})
        except BaseException:
            for connection in connections:
                connection.hang_up()
            for connection in connections:
                connection.process.wait()
            raise
        for connection in connections:
            words, restart = (shlex.split(record[each][connection.host]) for each in ("hosts", "restarts"))
            start = {"words": words, "restart_words": restart, "environment": environment, "grace": record["grace"]}
            connection.send("start", **start)
        logs = [path.parent / record["logs"].get(connection.host, "") for connection in connections]
        self._runs[record["job"]] = RemoteRun(connections, logs, record["grace"]), path
        return str(record["job"])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return whether the command that has launched the job runs, or its exit code."""
        record = _record(job)
        hosts = ", ".join(record["hosts"])
        if record["code"] is not None:
            return JobStatus(
                f"ssh job {record['job']} on {hosts}: ended with exit code {record['code']}", record["code"]
            )
        if record["machine"] != socket.gethostname():
            raise ConfigError(f"this job was launched on {record['machine']}; call this there")
        if started(record["process"]) != record["started"]:
            return JobStatus(
                f"ssh job {record['job']} on {hosts}: its launcher was killed, and the hosts have stopped", 1
            )
        return JobStatus(f"ssh job {record['job']} on {hosts}: runs, launched by process {record['process']}")

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
        status = self.status(job)
        if status.code is not None:
            raise ConfigError(f"{status.text}: there is nothing to stop")
        os.kill(_record(job)["process"], signal.SIGINT)


SSH = SshLauncher()


def _program(text: str) -> str:
    """Return the words of --program for the shell of a host, which replaces nothing in them but `~/` at their begin."""
    first, *rest = program_words(text)
    home = "~/" if first.startswith("~/") else ""
    return " ".join([home + shlex.quote(first.removeprefix(home)), *map(shlex.quote, rest)])


def _words(words: Sequence[str], host: SshHost, node: int, nodes: int, job: str) -> list[str]:
    """Return the command line on a host, without the program."""
    words = [*words]
    if host.ranks is not None:
        words += ["--ranks", str(host.ranks)]
    if nodes > 1:
        words += ["--nodes", str(nodes), "--rendezvous", _TO_BE_CHOSEN, "--node-rank", str(node), "--job-id", job]
    return words


def _environment(names: Sequence[str]) -> dict[str, str]:
    """Return variables by name. Raises ConfigError: one of them isn't set here, or would be written down."""
    variables = {}
    for text in names:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise ConfigError(f"--env: {name} isn't set here; set it, or write {name}=VALUE")
        if equals and names_a_secret(name):
            raise ConfigError(
                f"--env: {name} looks like a secret, which a file would show; set it, and give --env {name}"
            )
        variables[name] = value if equals else os.environ[name]
    return variables


def _connect(record: Mapping[str, Any], commands: Sequence[Sequence[str]]) -> list[HostConnection]:
    connections: list[HostConnection] = []
    try:
        for host, words in zip(record["hosts"], commands, strict=True):
            connections.append(HostConnection(host, SshProcess(host, words, record["program"])))
    except FileNotFoundError:
        raise RunFailed("ssh is not installed here; install OpenSSH's client") from None
    return connections


def _this_process() -> dict[str, Any]:
    return {"machine": socket.gethostname(), "process": os.getpid(), "started": started(os.getpid()), "code": None}


def _record(job: LaunchedJob) -> Mapping[str, Any]:
    """Return what was written when the job was launched. Raises ConfigError."""
    if job.folder is None:
        raise ConfigError(f"{job.number!r} is neither a job that ssh was given from here nor the folder of its run")
    try:
        record: Mapping[str, Any] = json.loads(read_bounded(job.folder / _RECORD, MAX_JSON_BYTES))
    except (OSError, ValueError):
        raise ConfigError(f"{job.folder / _RECORD} is missing or damaged: nothing is known of this job") from None
    return record
