"""Runs a command in containers of this machine, by Docker Compose: one launcher in each, on a network of their own.

plan      the compose file, and the calls of docker     submit    docker compose build, docker compose up
status    docker inspect of the job's containers        cancel    docker stop: the ranks save; then as after the end
follow    the log of node 0, then the exit code

After the end, the first call that notices it keeps the logs and the exit code in the job's folder, and removes the
containers with their network.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, Paused, RunFailed, Stopped, VerificationError
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import echo, plain
from lockstep.launch.meeting import TOKEN
from lockstep.launchers.docker_compose import FOLDER_LABEL, job_text
from lockstep.launchers.docker_options import DockerOptions, check, container_user
from lockstep.launchers.tools import execute, job_name, write_files

_NOT_HERE = "install Docker with its plugin Compose; --dry-run prints the compose file anywhere"
_REMEDIES = {
    "Cannot connect to the Docker daemon|permission denied .*docker": "`docker info` shows whether it answers you",
    "unknown command|is not a docker command|unknown shorthand flag": "install Docker Compose 2, a plugin of Docker",
    "could not select device driver": "install the NVIDIA Container Toolkit",
    "pull access denied|manifest unknown|repository does not exist": "give an image that is there: --image",
}
_PROJECT_LABEL, _SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
_COMPOSE_FILE, _END_FILE = "compose.yaml", "docker.json"
_ENDED = ("exited", "dead")
_CODES = (0, 1, ConfigError.exit_code, VerificationError.exit_code, Paused.exit_code, Stopped.exit_code)
_POLL_S = 1.0
_STOPPING_S = 60  # to stop a container beyond its grace period
_SHOWN_LINES = 3


class DockerLauncher:
    """The launcher `docker`."""

    options = DockerOptions

    def plan(self, command: JobCommand, options: DockerOptions) -> LaunchPlan:
        """Return the compose file and the calls that start it."""
        here = Path.cwd()
        check(command, options, here)
        name = job_name(command.name, secrets.token_hex(3))
        path = command.folder / _COMPOSE_FILE
        compose = ("docker", "compose", f"--file={path}")
        build = [(*compose, "build", "node0")] if options.image is None else []
        notes = []
        user = container_user(options, here)
        if options.user is None and int(user.partition(":")[0]) != os.getuid():
            notes.append(
                f"containers don't run as root: user {user} has to read this folder, and gets the run's folder"
            )
        commands = (*build, (*compose, "up", "--detach", "--no-build"))
        return LaunchPlan({path: job_text(command, options, name, here)}, commands, tuple(notes))

    def submit(self, plan: LaunchPlan) -> str:
        """Build the image, start the containers; remove what was made if that fails."""
        execute(("docker", "--version"), _NOT_HERE)
        _docker("compose", "version")
        _docker("info", "--format", "{{.ServerVersion}}")
        write_files(plan.files)
        ((path, text),) = plan.files.items()
        compose = yaml.safe_load(text)
        _give(path, compose["services"]["node0"]["user"])
        with undo_on_stop(lambda: _remove(compose["name"], path.parent)):
            try:
                for words in plan.commands:
                    _printed(words, {TOKEN: secrets.token_hex(32)})
            except RunFailed as failure:
                _undo(compose["name"], path.parent, failure)
                raise
        return str(compose["name"])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        state = _ask(job)
        if state.code is not None:
            _finish(job, state)
        return JobStatus(state.text, state.code)

    def follow(self, job: LaunchedJob) -> int:
        """Print the log of node 0 until all nodes have ended."""
        state, shown = _ask(job), ""
        if not state.containers:
            echo(_kept_log(job), end="", flush=True)
        log = _ContainerLog()
        while True:
            if state.text != shown:
                shown = state.text
                echo(shown, file=sys.stderr, flush=True)
            if state.containers:
                log.print_new(state.containers[0])
            if state.code is not None:
                _finish(job, state)
                return state.code
            time.sleep(_POLL_S)
            state = _ask(job, canceled=True)

    def cancel(self, job: LaunchedJob) -> None:
        """Stop the containers: the ranks save within the grace period."""
        state = _ask(job)
        if state.code is not None:
            raise ConfigError(f"it has ended already: {state.text}")
        grace = max(int(each["Config"].get("StopTimeout") or 0) for each in state.containers)
        execute(
            ("docker", "stop", *(each["Id"] for each in state.containers)), _NOT_HERE, patience_s=grace + _STOPPING_S
        )
        _finish(job, _ask(job, canceled=True))


DOCKER = DockerLauncher()


# --- docker ---------------------------------------------------------------------------------------------------------


def _docker(*words: str) -> str:
    """Call docker. Raises RunFailed, with a remedy if it is a frequent mistake."""
    try:
        return execute(("docker", *words), _NOT_HERE)
    except RunFailed as failure:
        raise _with_remedy(str(failure)) from None


def _with_remedy(text: str) -> RunFailed:
    remedy = next((remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, text)), "")
    return RunFailed(f"{text}; {remedy}" if remedy else text)


def _printed(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run docker, and print on stderr what it prints, as it comes. Raises RunFailed."""
    last: list[str] = []
    environment = {**os.environ, **variables}
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=merged, errors="replace", env=environment
    ) as running:
        for line in running.stdout or ():
            echo(plain(line.rstrip("\n")), file=sys.stderr, flush=True)
            last = [*last, line.strip()][-_SHOWN_LINES:]
    if running.returncode:
        why = "; ".join(filter(None, last)) or f"exit code {running.returncode}"
        raise _with_remedy(f"docker compose failed: {plain(why)}")


def _give(path: Path, user: str) -> None:
    """Make the run's folder, in which a file was written, the user's of the containers, if root is who wrote it."""
    if os.getuid() != 0:
        return
    here, run_folder = Path.cwd(), path.parent.parent
    above = [place for place in run_folder.parents if here in place.parents]
    try:
        for place in (path, path.parent, run_folder, *above):
            if place.stat().st_uid == 0:
                os.chown(place, *(int(number) for number in user.split(":")))
    except OSError as error:
        raise RunFailed(f"can't give {run_folder} to user {user}: {error.strerror}") from None


def _remove(number: str, folder: Path) -> None:
    """Remove a job's containers and their network."""
    path = folder / _COMPOSE_FILE
    where = f"--file={path}" if path.is_file() else "--project-directory=/"
    words = ("docker", "compose", f"--project-name={number}", where, "down")
    execute(words, _NOT_HERE, patience_s=_STOPPING_S, variables={TOKEN: "unused"})


def _undo(number: str, folder: Path, failure: RunFailed) -> None:
    """Remove what was made before a call failed. Raises RunFailed, with both reasons, if that fails too."""
    try:
        _remove(number, folder)
    except RunFailed as second:
        left = command_line("docker", "compose", "--project-name", number, "down")
        raise RunFailed(f"{failure}; what was made is left ({second}); remove it: {left}") from None


# --- what Docker knows of a job -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DockerJob:
    """A job's state, and its containers as `docker inspect` describes them, that of node 0 first; none once removed."""

    text: str
    code: int | None
    containers: tuple[Mapping[str, Any], ...]


def _ask(job: LaunchedJob, *, canceled: bool = False) -> _DockerJob:
    """Return the state of a job.

    Args:
        canceled: If nothing is known of it, it was canceled.

    Raises:
        ConfigError: There is no such job.
    """
    number = job.number
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", number):
        raise ConfigError(f"{number!r} is neither the name of a job in containers nor the folder of its run")
    kept = _kept_end(job)
    if kept is not None:
        return kept
    listed = _docker("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={_PROJECT_LABEL}={number}").split()
    try:
        containers = json.loads(_docker("inspect", "--type=container", *listed)) if listed else []
    except RunFailed:  # removed since they were listed
        containers = []
    if not containers:
        kept = _kept_end(job)
        if kept is None and canceled:
            return _DockerJob(f"Docker {number}: canceled", Stopped.exit_code, ())
        if kept is None:
            raise ConfigError(f"Docker knows no job {number}; if it has ended, give the folder of its run")
        return kept
    containers.sort(key=_node)
    code = _code(containers)
    return _DockerJob(f"Docker {number}: {_described(containers, code)}", code, tuple(containers))


def _node(container: Mapping[str, Any]) -> int:
    return int(re.sub(r"\D", "", container["Config"]["Labels"].get(_SERVICE_LABEL, "")) or 0)


def _code(containers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the exit code of the run, which all its launchers have; 1 if one of them was killed; None: it runs."""
    if any(each["State"]["Status"] not in _ENDED for each in containers):
        return None
    codes = {int(each["State"]["ExitCode"]) for each in containers}
    if len(codes - {0}) > 1 or not codes <= set(_CODES):
        return 1
    return max(codes)


def _described(containers: Sequence[Mapping[str, Any]], code: int | None) -> str:
    states = {f"node{_node(each)}": each["State"] for each in containers}
    reasons = []
    for name, state in states.items():
        if state.get("OOMKilled"):
            reasons.append(f"{name} was killed: out of memory")
        elif state["Status"] in _ENDED and int(state["ExitCode"]) not in _CODES:
            reasons.append(f"{name} ended with exit code {state['ExitCode']}")
        if state.get("Error"):
            reasons.append(f"{name}: {plain(state['Error'])}")
    running = sum(state["Status"] == "running" for state in states.values())
    main = f"{running} of {len(states)} nodes running" if code is None else f"ended, exit code {code}"
    return f"{main} ({'; '.join(reasons)})" if reasons else main


class _ContainerLog:
    """Prints the log of a container, each line once."""

    def __init__(self) -> None:
        self._last = ""

    def print_new(self, container: Mapping[str, Any]) -> None:
        """Print what is new until the container ends, or the connection to Docker breaks."""
        since = [f"--since={self._last}"] if self._last else []
        words = ("docker", "logs", "--follow", "--timestamps", *since, container["Id"])
        pipe, merged = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=merged, errors="replace") as logs:
            for line in logs.stdout or ():
                moment, _, text = line.rstrip("\n").partition(" ")
                if moment > self._last:
                    self._last = moment
                    echo(plain(text), flush=True)


# --- what is kept of a job that has ended ---------------------------------------------------------------------------


def _folder(job: LaunchedJob, state: _DockerJob) -> Path | None:
    """Return the folder of the job's files, if it is on this machine."""
    labels = state.containers[0]["Config"]["Labels"] if state.containers else {}
    folder = job.folder or (Path(labels[FOLDER_LABEL]) if FOLDER_LABEL in labels else None)
    return folder if folder is not None and folder.is_dir() else None


def _finish(job: LaunchedJob, state: _DockerJob) -> None:
    """Keep the logs and the end of a job in its folder, and remove its containers; leave them if there is no folder."""
    folder = _folder(job, state)
    if folder is None or not state.containers:
        return
    try:
        for container in state.containers:
            _keep_log(container, folder / f"node-{_node(container)}.log")
    except (OSError, RunFailed) as error:
        if _kept_end(LaunchedJob(job.number, folder)) is None:  # or another command has kept them
            echo(f"note: the containers stay, because their logs can't be kept: {error}", file=sys.stderr)
        return
    end = {"job": job.number, "code": state.code, "text": state.text}
    write_files({folder / _END_FILE: json.dumps(end, indent=2) + "\n"})
    _remove(job.number, folder)


def _keep_log(container: Mapping[str, Any], path: Path) -> None:
    """Write a container's log to a file. Raises OSError or RunFailed; then what the file had before stays."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        done = subprocess.run(("docker", "logs", container["Id"]), stdout=file, stderr=file, check=False)
    if done.returncode:
        part.unlink()
        raise RunFailed(f"docker logs ends with exit code {done.returncode}")
    part.replace(path)


def _kept_end(job: LaunchedJob) -> _DockerJob | None:
    """Return how a job has ended, if that was kept."""
    if job.folder is None:
        return None
    try:
        end = json.loads(read_bounded(job.folder / _END_FILE, MAX_JSON_BYTES))
        kept = _DockerJob(str(end["text"]), int(end["code"]), ())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if end["job"] == job.number else None


def _kept_log(job: LaunchedJob) -> str:
    path = (job.folder or Path()) / "node-0.log"
    try:
        return "".join(f"{plain(line)}\n" for line in path.read_text(errors="replace").splitlines())
    except OSError:
        return ""
