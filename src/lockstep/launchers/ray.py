"""Runs a command on the nodes of a Ray cluster, as a job of Ray's Jobs API.

plan      the order, and the job with it as its entrypoint      submit    the job; its first line, or why it ended
status    the job's state                                       cancel    stop of the job: SIGTERM, saved
follow    the job's output, then the exit code of its entrypoint

The entrypoint, `ray_driver`, places one launcher on each node. A job's identifier is its submission id, with the
dashboard's address and / before it where that was given.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Failure, RunFailed, Stopped
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.terminal import echo, plain
from lockstep.launchers.host_checks import shared_folders
from lockstep.launchers.ray_driver import STARTS, WAITS
from lockstep.launchers.ray_options import ADDRESS, RayOptions, bundle, check
from lockstep.launchers.tools import Patience, job_name, own_program, seconds_to_save, write_files

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_RECORD = "ray.json"
_DASHBOARD = "http://127.0.0.1:8265"
_NOT_UPLOADED = [".git", ".venv", "runs", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"]
_FIRST_LINE_S = 30.0  # after which a job counts as submitted, whatever it does
_STOPPED_S = 30  # that nodes have beyond the time to save
_CONNECT_S = 5.0
_POLL_S = 0.5
_MOST_LINES = 8
_CODES = (1, 2, 3, 75, 130)  # of Lockstep's failures
_SHELLS = re.compile(r"\S*sh: .*(not found|denied|No such file)", re.IGNORECASE)
_RAYS_OWN = re.compile(r"[-\d]+ [:,\d]+\t\w+ job_manager\.py|Running entrypoint for job ")


class RayLauncher:
    """The launcher `ray`."""

    options = RayOptions

    def plan(self, command: JobCommand, options: RayOptions) -> LaunchPlan:
        """Return the order for the job's driver, and the call of `ray` that submits a job with it."""
        check(command, options)
        job = job_name(command.name, secrets.token_hex(3))
        here = Path.cwd()
        folder = None if options.upload else options.folder or str(here)
        program = options.program or own_program()
        grace = seconds_to_save(command, options.nodes) if options.grace == "auto" else options.grace
        order = {
            "job": job,
            "words": command.words,
            "restart_words": command.restart_words,
            "nodes": options.nodes,
            "bundle": bundle(command, options),
            "folder": folder,
            "shared": shared_folders(command, here, folder or str(here)),
            "logs": str(command.folder),
            "program": program,
            "wait": options.wait,
            "retries": options.retries,
            "grace": grace,
            "environment": dict(text.split("=", 1) for text in options.env),
        }
        environment: dict[str, Any] = {
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(grace + _STOPPED_S)},
            **({"working_dir": str(here), "excludes": _NOT_UPLOADED} if options.upload else {}),
        }
        record = {
            "address": _address(options.address),
            "submission_id": job,
            "entrypoint": f"{program} launch on-ray {shlex.quote(json.dumps(order))}",
            "runtime_env": environment,
        }
        words: tuple[str, ...] = (
            "ray",
            "job",
            "submit",
            "--no-wait",
            "--address",
            str(record["address"]),
            "--submission-id",
            job,
        )
        words += ("--runtime-env-json", json.dumps(environment), "--", *shlex.split(str(record["entrypoint"])))
        number = job if record["address"] == _DASHBOARD else f"{record['address']}/{job}"
        return LaunchPlan({command.folder / _RECORD: json.dumps(record, indent=2) + "\n"}, (words,), number=number)

    def submit(self, plan: LaunchPlan) -> str:
        """Submit the job, and wait until its nodes are found or waited for. Raises RunFailed: it has ended before."""
        ((path, text),) = plan.files.items()
        record = json.loads(text)
        address = record.pop("address")
        job = _RayJob(_client(address), record["submission_id"])
        write_files({path: text})
        job.submit(record)
        job.wait_for_first_line()
        return plan.number

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        return _named(job.number).status()

    def follow(self, job: LaunchedJob) -> int:
        """Print the job's output until it has ended."""
        ray_job, output = _named(job.number), _JobOutput()
        shown, patience = "", Patience(job.number, "ray")
        while True:
            with patience:
                status = ray_job.status()
                if status.text != shown:
                    shown = status.text
                    echo(shown, file=sys.stderr, flush=True)
                ray_job.print_new(output, until_it_ends=status.code is None)
                if status.code is not None:
                    return status.code
            time.sleep(_POLL_S)

    def cancel(self, job: LaunchedJob) -> None:
        """Stop the job: its driver gets SIGTERM, and the nodes save and stop within its grace."""
        ray_job = _named(job.number)
        status = ray_job.status()
        if status.code is not None:
            raise ConfigError(f"it has ended already: {status.text}")
        ray_job.stop()


RAY = RayLauncher()


def _address(given: str | None) -> str:
    address = given or os.environ.get("RAY_API_SERVER_ADDRESS") or _DASHBOARD
    return (address if "://" in address else f"http://{address}").rstrip("/")


# --- Ray's Jobs API -------------------------------------------------------------------------------------------------


def _client(address: str) -> JobSubmissionClient:
    """Return Ray's client. Raises RunFailed: it isn't installed, or nothing answers."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise RunFailed(
            f"Ray isn't installed for {sys.executable}; {pip_install('ray')}, or your cluster's version"
        ) from None
    parts = urlsplit(address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
        headers = json.loads(os.environ.get("RAY_JOB_HEADERS") or "{}")
        client = JobSubmissionClient(address, headers=headers)
    except (OSError, ValueError, RuntimeError) as error:
        why = _one_line(str(getattr(error, "strerror", None) or error))
        raise RunFailed(
            f"no Ray dashboard answers at {address} ({why}); give --address http://HEAD:8265, or start Ray with its "
            f"dashboard: {pip_install('ray')}, ray start --head"
        ) from None
    logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.ERROR)
    return client


def _named(number: str) -> _RayJob:
    address, slash, name = number.rpartition("/")
    if not re.fullmatch(r"[\w-]+", name) or (slash and not ADDRESS.fullmatch(address)):
        raise ConfigError(f"{number!r} is neither the id of a Ray job nor the folder of a run that Ray was given")
    return _RayJob(_client(address or _address(None)), name)


@dataclass(frozen=True, slots=True)
class _RayJob:
    """A job by its submission id."""

    client: JobSubmissionClient
    number: str

    def submit(self, record: Mapping[str, Any]) -> None:
        """Create the job. Raises RunFailed."""
        with _answers(self.number):
            self.client.submit_job(**record)

    def wait_for_first_line(self) -> None:
        """Wait until the job's driver has printed what it starts on or waits for. Raises RunFailed: it has failed."""
        until = time.monotonic() + _FIRST_LINE_S
        while time.monotonic() < until:
            status = self.status()
            lines = self.first_lines()
            if any(line.startswith((STARTS, WAITS)) for line in lines) or status.code == 0:
                return
            if status.code is not None:
                own = max((at for at, line in enumerate(lines) if line.startswith("lockstep: ")), default=-_MOST_LINES)
                raise _failure(status.code, "\n".join(lines[own:][:_MOST_LINES]) or status.text)
            time.sleep(_POLL_S)

    def status(self) -> JobStatus:
        """Return its state. Raises ConfigError: there is no such job."""
        with _answers(self.number):
            info = self.client.get_job_info(self.number)
        state, code = info.status.value, info.driver_exit_code
        if code not in _CODES:  # ended by a signal, or not started
            code = RunFailed.exit_code
        codes = {"SUCCEEDED": 0, "FAILED": code, "STOPPED": Stopped.exit_code}
        ending = f", exit code {code}" if state == "FAILED" else ""
        is_explained = state == "PENDING" or (state == "FAILED" and info.driver_exit_code is None)
        why = f" ({_one_line(info.message)})" if is_explained and info.message else ""
        return JobStatus(f"Ray job {self.number}: {state}{ending}{why}", codes.get(state))

    def print_new(self, output: _JobOutput, *, until_it_ends: bool) -> None:
        """Print what is new of its output: all, or what comes as long as the dashboard sends it."""
        with _answers(self.number):
            if until_it_ends:
                asyncio.run(self._print_tail(output))
            else:
                output.print_new(self.client.get_job_logs(self.number), 0)
                output.print_rest()

    async def _print_tail(self, output: _JobOutput) -> None:
        place = 0
        async for text in self.client.tail_job_logs(self.number):
            output.print_new(text, place)
            place += len(text)

    def first_lines(self) -> list[str]:
        """Return what it has printed so far, without Ray's own lines."""
        with _answers(self.number):
            lines = self.client.get_job_logs(self.number).splitlines()
        return [line for line in lines if not _RAYS_OWN.match(line)]

    def stop(self) -> None:
        """Have it stopped by SIGTERM."""
        with _answers(self.number):
            self.client.stop_job(self.number)


@dataclass
class _JobOutput:
    """The output of a job as far as it was printed, without Ray's own lines."""

    read: int = 0
    rest: str = ""

    def print_new(self, text: str, place: int) -> None:
        """Print the whole lines of a part of the output that are new.

        Args:
            place: Where the part begins in the output.
        """
        new = text[max(self.read - place, 0) :]
        self.read = max(self.read, place + len(text))
        *lines, self.rest = (self.rest + new).split("\n")
        for line in lines:
            if not _RAYS_OWN.match(line):
                echo(plain(line), flush=True)

    def print_rest(self) -> None:
        """Print a last line that has no end."""
        self.print_new("\n" if self.rest else "", self.read)


@contextmanager
def _answers(number: str) -> Iterator[None]:
    """Turn errors of Ray's client into sentences. Raises ConfigError: there is no such job."""
    import aiohttp

    try:
        yield
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        text = _one_line(str(error))
        if "does not exist" in text:
            raise ConfigError(
                f"Ray knows no job {number}: it is on another cluster (--address), or the cluster was started again"
            ) from None
        raise RunFailed(f"Ray's dashboard refuses or doesn't answer: {text}") from None


def _one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def _failure(code: int, text: str) -> Failure:
    """Return a failed job's message as the error that has its exit code."""
    text = text.removeprefix("lockstep: ")
    if _SHELLS.match(text):
        text += "; install Lockstep on the cluster's head node, too, or give its path with --program"
    return ConfigError(text) if code == ConfigError.exit_code else RunFailed(text)
