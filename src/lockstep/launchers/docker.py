"""Runs a command in containers of this machine, by Docker Compose: one launcher in each, on a network of their own.

After the end, the first call that notices it keeps the logs and the exit code in the job's folder, and removes the
containers with their network.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, Paused, Problem, RunFailed, Stopped, VerificationError, refuse
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import command_line, echo, plain
from lockstep.launch.rendezvous import TOKEN
from lockstep.launchers.mounts import Mount, mount_problems
from lockstep.launchers.tools import (
    as_comment,
    as_yaml,
    execute,
    follow_until_end,
    job_name,
    program_words,
    read_record,
    refuse_to_cancel_ended,
    seconds_to_save,
    variable_problems,
    write_files,
)
from lockstep.strategies.section import Auto, Positive, Section

_NOT_HERE = "install Docker with its plugin Compose; --dry-run prints the compose file anywhere"
_SECRET = "which would be written down; set it, and give --env {name}"
_COMPOSE_FILE, _END_FILE, _LOG_FILE = "compose.yaml", "docker.json", "docker.log"
_BUILD_ARGUMENTS = ("BASE_IMAGE", "TORCH_INDEX", "LOCKSTEP")  # Compose takes them from variables of these names
_VOLUME = re.compile(r"(?P<host>[^:]+):(?P<path>/[^:/][^:]*)(?P<mode>:ro|:rw)?")
_PORT = 29500  # of node 0, in the containers' own network
_CODES = (0, 1, ConfigError.exit_code, VerificationError.exit_code, Paused.exit_code, Stopped.exit_code)
_STDERR = 2  # the file
_POLL_S = 1.0
_STOPPING_S = 3600  # more than a container's own grace period


class DockerOptions(Section):
    """Options of a job in containers on this machine."""

    image: str | None = None
    """Image with Lockstep; by default it is built from the Dockerfile in the current folder."""
    nodes: Positive = 1
    """Number of containers; in each of them one launcher starts the ranks."""
    gpus_per_node: Positive | None = None
    """NVIDIA GPUs of each node, in their order; without --ranks, each gets a rank."""
    volume: tuple[str, ...] = ()
    """A further folder, and its path in the containers, such as /data:/data:ro; may be repeated. They see the
    current folder anyway, at its own path."""
    env: tuple[str, ...] = ()
    """An environment variable, as NAME=VALUE, or NAME with its value here, which no file has; may be repeated."""
    shm: str = "8gb"
    """Size of /dev/shm of each container."""
    user: str | None = None
    """User id, or UID:GID, that the containers run with; by default yours."""
    grace: Positive | Auto = "auto"
    """Seconds that a container has to save and stop; auto: a minute, and the time that 200 MB/s take to save."""
    program: str = "lockstep"
    """Program that starts Lockstep in the image."""


class DockerLauncher:
    """The launcher `docker`."""

    options = DockerOptions

    def plan(self, command: JobCommand, options: DockerOptions) -> LaunchPlan:
        """Return the compose file and the calls that start it."""
        _check(command, options, Path.cwd())
        path = command.folder / _COMPOSE_FILE
        name = job_name(command.name, secrets.token_hex(3))
        compose = ("docker", "compose", f"--file={path}")
        build = [(*compose, "build", "node0")] if options.image is None else []
        text = _job_text(command, options, name, Path.cwd())
        return LaunchPlan({path: text}, (*build, (*compose, "up", "--detach", "--no-build")), number=name)

    def submit(self, plan: LaunchPlan) -> str:
        """Build the image, start the containers; remove what was made if that fails."""
        execute(("docker", "compose", "ls"), _NOT_HERE)
        write_files(plan.files)
        variables = {**os.environ, TOKEN: secrets.token_hex(32)}
        with undo_on_stop(lambda: _remove(plan.number)):
            for words in plan.commands:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=_STDERR, env=variables)
                if done.returncode:
                    _remove(plan.number)
                    raise RunFailed(f"docker compose failed with exit code {done.returncode}; its output says why")
        return plan.number

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        return _finished(job, _state(job))

    def follow(self, job: LaunchedJob) -> int:
        """Print the log of node 0 until all nodes have ended."""
        _state(job)
        since = "0"

        def print_new(status: JobStatus) -> None:
            nonlocal since
            if _kept_end(job) is None:
                _print_log(job.number, since)
                since = str(time.time())
            _finished(job, status)

        return follow_until_end("docker", job.number, lambda: _state(job, canceled=True), print_new, _POLL_S)

    def cancel(self, job: LaunchedJob) -> None:
        """Stop the containers: the ranks save within the grace period."""
        refuse_to_cancel_ended(_state(job))
        _compose(job.number, "stop")
        _finished(job, _state(job, canceled=True))


DOCKER = DockerLauncher()


# --- options --------------------------------------------------------------------------------------------------------


def _check(command: JobCommand, options: DockerOptions, folder: Path) -> None:
    problems = [*_malformed(options, folder), *variable_problems(options.env, _SECRET, from_here=True)]
    problems = problems or mount_problems(command, _mounts(options, folder), folder, "--volume", ":ro")
    refuse(problems)


def _malformed(options: DockerOptions, folder: Path) -> Iterator[Problem]:
    if options.image is None and not (folder / "Dockerfile").is_file():
        yield Problem("--image", "", "is missing, and there is no Dockerfile here to build it from; give an image in "
                      "which Lockstep is installed, or write a Dockerfile: lockstep init docker")  # fmt: skip
    if options.user is not None and not re.fullmatch(r"[0-9]+(:[0-9]+)?", options.user):
        yield Problem("--user", "", f"{options.user!r} is not UID or UID:GID, such as 1000:1000")
    for text in options.volume:
        match = _VOLUME.fullmatch(text)
        if match is None:
            yield Problem("--volume", "", f"{text!r} is not FOLDER:/PATH or FOLDER:/PATH:ro, such as /data:/data:ro")
        elif not (folder / Path(match["host"]).expanduser()).exists():
            yield Problem("--volume", "", f"there is no {match['host']} here; create it")


def _mounts(options: DockerOptions, folder: Path) -> list[Mount]:
    mounts = [Mount(str(folder), str(folder))]
    for match in filter(None, map(_VOLUME.fullmatch, options.volume)):
        host = os.path.normpath(folder / Path(match["host"]).expanduser())
        mounts.append(Mount(host, os.path.normpath(match["path"]), match["mode"] == ":ro"))
    return mounts


# --- the compose file -----------------------------------------------------------------------------------------------


def _job_text(command: JobCommand, options: DockerOptions, name: str, folder: Path) -> str:
    nodes = options.nodes
    up = as_comment(command_line("docker", "compose", "--file", command.folder / _COMPOSE_FILE, "up"))
    head = [
        as_comment(command.typed),
        "Written by that command, to be read, changed and started again:",
        f'{TOKEN}="$(openssl rand -hex 32)" {up}' if nodes > 1 else up,
    ]
    services = {}
    for node in range(nodes):
        joining = ["--nodes", str(nodes), "--rendezvous", f"node0:{_PORT}", "--node-rank", str(node), "--job-id", name]
        own = {"container_name": f"{name}-node{node}", "hostname": f"node{node}", **_devices(options, node)}
        words = [*command.words, *(joining if nodes > 1 else ())]
        services[f"node{node}"] = _escaped({**_service(command, options, folder), **own, "command": words})
    compose = {"name": name, "services": services, "networks": {"ranks": {"driver": "bridge"}}}
    return "".join([*(f"# {line}\n" for line in head), as_yaml(compose)])


def _service(command: JobCommand, options: DockerOptions, folder: Path) -> dict[str, Any]:
    grace = seconds_to_save(command, 1) if options.grace == "auto" else options.grace
    image = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "lockstep-project"
    built = {"image": f"{image}:latest", "build": {"context": str(folder), "args": dict.fromkeys(_BUILD_ARGUMENTS)}}
    parts = [text.partition("=") for text in options.env]
    own = {"HOME": "/tmp", "USER": "lockstep"}  # the user id may have no name in the image
    token = {TOKEN: f"${{{TOKEN}:?is made by lockstep launch docker}}"} if options.nodes > 1 else {}
    return {
        **(built if options.image is None else {"image": options.image}),
        "user": options.user or f"{os.getuid()}:{os.getgid()}",
        "init": True,
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{grace}s",
        "shm_size": options.shm,
        "ulimits": {"memlock": -1},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "no",
        "logging": {"driver": "local", "options": {"max-size": "50m", "max-file": "2"}},
        "networks": ["ranks"],
        "working_dir": str(folder),
        "entrypoint": program_words(options.program),
        "environment": {**own, **{name: value if equals else None for name, equals, value in parts}, **token},
        "volumes": [
            {
                "type": "bind",
                "source": mount.host,
                "target": mount.target,
                **({"read_only": True} if mount.read_only else {}),
                "bind": {"create_host_path": False},  # it would be root's
            }
            for mount in _mounts(options, folder)
        ],
    }


def _devices(options: DockerOptions, node: int) -> dict[str, Any]:
    if not options.gpus_per_node:
        return {}
    first = node * options.gpus_per_node
    numbers = [str(number) for number in range(first, first + options.gpus_per_node)]
    device = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _escaped(value: Any) -> Any:
    """Return the value with `$` doubled, so that Compose replaces no variable but the token's."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: each if key == TOKEN else _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list) else value


# --- what Docker knows of a job -------------------------------------------------------------------------------------


def _compose_words(number: str, *words: str) -> tuple[str, ...]:
    """Return a call about a job, which reads no compose file of the current folder."""
    return ("docker", "compose", f"--project-name={number}", "--project-directory=/", *words)


def _compose(number: str, *words: str) -> str:
    return execute(_compose_words(number, *words), _NOT_HERE, patience_s=_STOPPING_S)


def _remove(number: str) -> None:
    """Remove a job's containers and their network. Raises RunFailed, with the call that tries it again."""
    try:
        _compose(number, "down")
    except RunFailed as failure:
        left = command_line("docker", "compose", "--project-name", number, "down")
        raise RunFailed(f"what was made is left ({failure}); remove it: {left}") from None


def _state(job: LaunchedJob, *, canceled: bool = False) -> JobStatus:
    """Return the state of a job; of a `canceled` one nothing may be left. Raises ConfigError: there is no such job."""
    number = job.number
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", number):
        raise ConfigError(f"{number!r} is neither the name of a job in containers nor the folder of its run")
    if (kept := _kept_end(job)) is not None:
        return kept
    parsed = map(json.loads, _compose(number, "ps", "--all", "--format=json").splitlines())
    entries = [entry for each in parsed for entry in (each if isinstance(each, list) else [each])]  # a list before 2.21
    ends = {each["Service"]: each["ExitCode"] if each["State"] in ("exited", "dead") else None for each in entries}
    if not ends and not canceled:
        raise ConfigError(f"Docker knows no job {number}; if it has ended, give the folder of its run")
    if not ends:
        return JobStatus(f"Docker {number}: canceled", Stopped.exit_code)
    code = _code([*ends.values()])
    odd = [f"{name} ended with exit code {its}" for name, its in sorted(ends.items()) if its not in (None, *_CODES)]
    why = f" ({'; '.join(odd)})" if odd else ""
    running = sum(each["State"] == "running" for each in entries)
    main = f"{running} of {len(ends)} nodes running" if code is None else f"ended, exit code {code}"
    return JobStatus(f"Docker {number}: {main}{why}", code)


def _code(codes: list[int | None]) -> int | None:
    """Return the exit code of the run, which all its launchers have; 1 if one of them was killed; None: it runs."""
    ended = {code for code in codes if code is not None}
    if None in codes:
        return None
    return 1 if len(ended - {0}) > 1 or not ended <= {*_CODES} else max(ended)


def _print_log(number: str, since: str) -> None:
    """Print the log of node 0 from a time on, until its container ends or the connection to Docker breaks."""
    words = _compose_words(number, "logs", "--follow", "--no-log-prefix", f"--since={since}", "node0")
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=merged, errors="replace") as logs:
        for line in logs.stdout or ():
            echo(plain(line.rstrip("\n")), flush=True)


# --- what is kept of a job that has ended ---------------------------------------------------------------------------


def _finished(job: LaunchedJob, status: JobStatus) -> JobStatus:
    """Keep the logs and the end of a job in its folder, and remove its containers; leave them if there is no folder."""
    if status.code is not None and job.folder is not None and _kept_end(job) is None:
        end = {"job": job.number, "code": status.code, "text": status.text}
        write_files({job.folder / _LOG_FILE: _compose(job.number, "logs", "--no-color")})
        write_files({job.folder / _END_FILE: json.dumps(end, indent=2) + "\n"})
        _remove(job.number)
    return status


def _kept_end(job: LaunchedJob) -> JobStatus | None:
    end = read_record(None if job.folder is None else job.folder / _END_FILE)
    return JobStatus(str(end.get("text")), int(end.get("code", 1))) if end.get("job") == job.number else None
