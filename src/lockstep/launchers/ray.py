"""Runs a command on the nodes of a Ray cluster, as a job of Ray's Jobs API.

The job's entrypoint, `ray_driver`, places one launcher on each node. A job's identifier is its submission id, with the
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem, RunFailed, Stopped, refuse
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.terminal import echo, plain
from lockstep.launchers.tools import (
    follow_until_end,
    job_name,
    own_program,
    pairs,
    refuse_to_cancel_ended,
    seconds_to_save,
    variable_problems,
    write_files,
)
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_RECORD = "ray.json"
_DASHBOARD = "http://127.0.0.1:8265"
_ADDRESS = re.compile(r"https?://[^\s/@]+(?::\d+)?(?:/[^\s@]*)?|[^\s/:@]+:\d+")
_RESOURCE = re.compile(r"([A-Za-z][\w:.-]*)=(\d+(?:\.\d+)?)")
_SECRET = "and Ray's dashboard shows its value; set it where Ray is started"
_NOT_UPLOADED = [".git", ".venv", "runs", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"]
_STOPPED_S = 30  # that nodes have beyond the time to save
_CONNECT_S = 5.0
_POLL_S = 0.5
_CODES = (1, 2, 3, 75, 130)  # of Lockstep's failures
_RAYS_OWN = re.compile(r"[-\d]+ [:,\d]+\t\w+ job_manager\.py|Running entrypoint for job ")


class RayOptions(Section):
    """Options of a job on a Ray cluster."""

    nodes: Positive = 1
    """Number of nodes; on each of them one launcher starts the ranks."""
    gpus_per_node: Positive | None = None
    """GPUs of each node; without --ranks, each gets a rank."""
    cpus_per_node: Positive | Auto = "auto"
    """CPUs of each node that are taken from Ray; auto: one for each rank or GPU, where their number is known."""
    resource: tuple[str, ...] = ()
    """Another resource of Ray that each node must have, such as accelerator_type:H100=0.001; may be repeated."""
    address: str | None = None
    """Address of Ray's dashboard; by default RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265."""
    folder: str | None = None
    """Working folder, shared by all nodes; by default the path of this one."""
    upload: bool = False
    """Give each node a copy of this folder through Ray, instead of sharing it; at most 500 MiB."""
    program: str | None = None
    """Command that starts Lockstep on the nodes; by default this one's path."""
    env: tuple[str, ...] = ()
    """An environment variable for the run, such as NCCL_DEBUG=INFO; may be repeated."""
    wait: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait for nodes that the cluster doesn't have yet; nodes that are busy are always waited for."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How many times the run starts again when it has lost a node; it resumes."""
    grace: Positive | Auto = "auto"
    """Seconds that a node has to save and stop; auto: a minute, and the time that 200 MB/s a node take to save the
    state."""


def _misfitting(command: JobCommand, options: RayOptions) -> Iterator[Problem]:
    if options.upload and options.folder is not None:
        yield Problem("--upload", "", "copies this folder, and --folder names a shared one; give one of them")
    if options.retries and command.restart_words != command.words:
        why = "would start over with each retry; leave out --retries, or start from them once"
        yield Problem("--fresh, --from, --fork", "", why)
    if options.address is not None and not _ADDRESS.fullmatch(options.address):
        yield Problem("--address", "", f"{options.address!r} is no dashboard's address, such as http://HEAD:8265")
    for text in options.resource:
        if not _RESOURCE.fullmatch(text):
            yield Problem("--resource", "", f"{text!r} is not NAME=AMOUNT, such as accelerator_type:H100=0.001")
    place = command.checkpoint_folder or str(command.run_folder)
    is_kept = is_address(place) or PurePosixPath(place).is_absolute() or not command.in_folder
    if options.upload and options.folder is None and command.starts_run and not is_kept:
        remedy = "give an absolute path of a shared folder, or checkpoint.folder=s3://BUCKET/PREFIX"
        yield Problem("", "run.folder", f"would be lost with Ray's copy of this folder; {remedy}")


def _bundle(command: JobCommand, options: RayOptions) -> dict[str, float]:
    number = command.ranks or options.gpus_per_node or 1
    cpus = number if options.cpus_per_node == "auto" else options.cpus_per_node
    gpus = {} if options.gpus_per_node is None else {"GPU": options.gpus_per_node}
    others = {name: float(amount) for name, _, amount in (text.rpartition("=") for text in options.resource)}
    return {**others, "CPU": cpus, **gpus}


class RayLauncher:
    """The launcher `ray`."""

    options = RayOptions

    def plan(self, command: JobCommand, options: RayOptions) -> LaunchPlan:
        """Return the order for the job's driver, and the call of `ray` that submits a job with it."""
        refuse([*variable_problems(options.env, _SECRET), *_misfitting(command, options)])
        job = job_name(command.name, secrets.token_hex(3))
        here = Path.cwd()
        program = options.program or own_program()
        grace = seconds_to_save(command, options.nodes) if options.grace == "auto" else options.grace
        order = {
            **options.model_dump(include={"nodes", "wait", "retries"}),
            "job": job,
            "words": command.words,
            "restart_words": command.restart_words,
            "bundle": _bundle(command, options),
            "folder": None if options.upload else options.folder or str(here),
            "logs": str(command.folder),
            "program": program,
            "grace": grace,
            "environment": pairs(options.env),
        }
        environment: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(grace + _STOPPED_S)}}
        if options.upload:
            environment |= {"working_dir": str(here), "excludes": _NOT_UPLOADED}
        address, entrypoint = _address(options.address), f"{program} launch on-ray {shlex.quote(json.dumps(order))}"
        record = {"address": address, "submission_id": job, "entrypoint": entrypoint, "runtime_env": environment}
        line = ["ray", "job", "submit", "--no-wait", "--address", address, "--submission-id", job]
        line += ["--runtime-env-json", json.dumps(environment), "--", *shlex.split(entrypoint)]
        number = job if address == _DASHBOARD else f"{address}/{job}"
        files = {command.folder / _RECORD: json.dumps(record, indent=2) + "\n"}
        return LaunchPlan(files, (tuple(line),), number=number)

    def submit(self, plan: LaunchPlan) -> str:
        """Submit the job. Raises RunFailed."""
        ((path, text),) = plan.files.items()
        record = json.loads(text)
        client = _client(record.pop("address"))
        write_files({path: text})
        with _answers(record["submission_id"]):
            client.submit_job(**record)
        return plan.number

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        return _status(*_named(job.number))

    def follow(self, job: LaunchedJob) -> int:
        """Print the job's output until it has ended."""
        client, name = _named(job.number)
        output = JobOutput()

        def print_new(status: JobStatus) -> None:
            with _answers(name):
                if status.code is None:
                    asyncio.run(_print_tail(client, name, output))
                else:
                    output.print_new(client.get_job_logs(name) + "\n", 0)

        return follow_until_end("ray", job.number, lambda: _status(client, name), print_new, _POLL_S)

    def cancel(self, job: LaunchedJob) -> None:
        """Stop the job: its driver gets SIGTERM, and the nodes save and stop within its grace."""
        client, name = _named(job.number)
        refuse_to_cancel_ended(_status(client, name))
        with _answers(name):
            client.stop_job(name)


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
        remedy = f"{pip_install('ray')}, or your cluster's version"
        raise RunFailed(f"Ray isn't installed for {sys.executable}; {remedy}") from None
    parts = urlsplit(address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
        client = JobSubmissionClient(address, headers=json.loads(os.environ.get("RAY_JOB_HEADERS") or "{}"))
    except (OSError, ValueError, RuntimeError) as error:
        why = _one_line(str(getattr(error, "strerror", None) or error))
        remedy = f"give --address http://HEAD:8265, or start Ray: {pip_install('ray')}, ray start --head"
        raise RunFailed(f"no Ray dashboard answers at {address} ({why}); {remedy}") from None
    logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.ERROR)
    return client


def _named(number: str) -> tuple[JobSubmissionClient, str]:
    address, slash, name = number.rpartition("/")
    if not re.fullmatch(r"[\w-]+", name) or (slash and not _ADDRESS.fullmatch(address)):
        raise ConfigError(f"{number!r} is neither the id of a Ray job nor the folder of a run that Ray was given")
    return _client(address or _address(None)), name


def _status(client: JobSubmissionClient, name: str) -> JobStatus:
    with _answers(name):
        info = client.get_job_info(name)
    state, code = info.status.value, info.driver_exit_code
    if code not in _CODES:  # ended by a signal, or not started
        code = RunFailed.exit_code
    codes = {"SUCCEEDED": 0, "FAILED": code, "STOPPED": Stopped.exit_code}
    ending = f", exit code {code}" if state == "FAILED" else ""
    is_explained = state == "PENDING" or (state == "FAILED" and info.driver_exit_code is None)
    why = f" ({_one_line(info.message)})" if is_explained and info.message else ""
    return JobStatus(f"Ray job {name}: {state}{ending}{why}", codes.get(state))


async def _print_tail(client: JobSubmissionClient, name: str, output: JobOutput) -> None:
    place = 0
    async for text in client.tail_job_logs(name):
        output.print_new(text, place)
        place += len(text)


class JobOutput:
    """The output of a job as far as it was printed, without Ray's own lines."""

    def __init__(self) -> None:
        self._read = 0
        self._rest = ""

    def print_new(self, text: str, place: int) -> None:
        """Print the whole lines of a part of the output that are new.

        Args:
            place: Where the part begins in the output.
        """
        new = text[max(self._read - place, 0) :]
        self._read = max(self._read, place + len(text))
        *lines, self._rest = (self._rest + new).split("\n")
        for line in lines:
            if not _RAYS_OWN.match(line):
                echo(plain(line), flush=True)


@contextmanager
def _answers(name: str) -> Iterator[None]:
    """Turn errors of Ray's client into sentences. Raises ConfigError: there is no such job."""
    import aiohttp

    try:
        yield
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        text = _one_line(str(error))
        if "does not exist" in text:
            raise ConfigError(f"Ray knows no job {name}: another cluster (--address), or one that restarted?") from None
        raise RunFailed(f"Ray's dashboard refuses or doesn't answer: {text}") from None


def _one_line(text: str) -> str:
    return plain(" ".join(text.split()))
